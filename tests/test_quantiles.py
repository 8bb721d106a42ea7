"Quantile regression DQN: the loss against loops over pairs of quantiles, and what its learner shares with DQN."

from itertools import islice

import pytest
import torch
from gymnasium.spaces import Discrete
from hypothesis import given, settings
from hypothesis import strategies as st
from random_fragments import (
    CHOICE,
    OBS,
    SMALL,
    answers,
    assert_metrics,
    assert_same_loss,
    num,
    random_fragment,
    rewards_of,
    shaken,
)

from rollpipe.agents import QRDQN, evaluate
from rollpipe.agents.metrics import check_metrics
from rollpipe.agents.off_policy.q_learner import quantile_penalty, quantile_td
from rollpipe.agents.td import td
from rollpipe.layers import QuantilePolicy, RecurrentQPolicy
from rollpipe.layers.actor import without_past
from rollpipe.layers.observer import seeded
from rollpipe.layers.q_networks import QuantileHead
from rollpipe.pipes import nested
from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.recipes import replayed
from rollpipe.pipes.replay.memory import Sample
from rollpipe.settings.config import build, make_config

N = 3


class Remembering(RecurrentQPolicy):
    "Quantiles with memory."

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.several = QuantileHead(4, self.n_actions, N)

    def quantiles(self, state, hx=None):
        _, obs, act, rew, fin = state
        y, hx = self.recurrent_features(
            obs, *without_past(act, rew, fin), fin, None if isinstance(hx, tuple) else hx
        )
        return self.several(y), hx

    def q(self, obs, act, rew, fin, *, hx):
        y, hx = self.recurrent_features(obs, act, rew, fin, hx)
        return self.several(y).mean(-1), hx


def setting(seed, n_steps, n_envs, memory, terminal_obs, garbage, burn_in):
    "An actor, an older copy of it, and a fragment that a third one has collected; some row behind the burn-in is valid."
    with seeded(seed):
        actor = (
            Remembering(OBS, CHOICE, memory=4, past=True, **SMALL)
            if memory
            else QuantilePolicy(OBS, CHOICE, N, duelling=True, **SMALL)
        )
    target = shaken(actor, seed)
    old = shaken(actor, seed + 1)
    fragment = random_fragment(
        seed, n_steps, n_envs, actor, old=old, terminal_obs=terminal_obs, garbage=garbage
    )
    if not fragment.valid[burn_in:].any():
        return setting(seed + 1, n_steps, n_envs, memory, terminal_obs, garbage, burn_in)
    return actor, target, fragment


def slow_quantiles(net, fragment, burn_in):
    "(t, b) -> (quantiles of the state, quantiles of the state reached), each [n_actions, N], of the valid steps."

    def ask(state, hx, virtual):
        y, hx = net.quantiles(nested.as_seen(state), hx)
        return y[0, 0], hx

    return {
        at: (now, reached.tolist())
        for at, (now, reached) in answers(ask, fragment, burn_in).items()
    }


def slow_goals(fragment, own, other, double, gamma, n_steps, t, b):
    "The samples of the return of step (t, b): rewards one after the other, until quantiles take over."
    total, k = rewards_of(fragment, gamma, n_steps, t, b)
    if fragment.term[k + 1, b]:
        return [total] * N
    means = [sum(x) / N for x in (own if double else other)[k, b][1]]
    return [total + gamma ** (k + 1 - t) * x for x in other[k, b][1][means.index(max(means))]]


def slow_penalty(goals, values, huber):
    "The sum over quantiles of the mean over samples."
    total = 0.0
    for i, value in enumerate(values):
        for goal in goals:
            u = goal - value
            below = num(u) < 0
            size = abs(u)
            if num(size) <= huber:
                size = u * u / (2 * huber) if huber else size
            else:
                size = size - huber / 2
            total = total + abs((2 * i + 1) / (2 * len(values)) - below) * size / len(goals)
    return total


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    n_steps=st.integers(1, 8),
    n_envs=st.integers(1, 3),
    memory=st.booleans(),
    terminal_obs=st.booleans(),
    garbage=st.booleans(),
    double=st.booleans(),
    n=st.integers(1, 4),
    burn_in=st.integers(0, 3),
    huber=st.sampled_from([0, 0.5, 1.0]),
    weighted=st.sampled_from([None, 1, 2]),
)
def test_loss(
    seed, n_steps, n_envs, memory, terminal_obs, garbage, double, n, burn_in, huber, weighted
):
    burn_in = min(burn_in, n_steps - 1)
    actor, target, fragment = setting(seed, n_steps, n_envs, memory, terminal_obs, garbage, burn_in)
    weight = (
        None
        if weighted is None
        else torch.rand(
            (n_steps, n_envs)[2 - weighted :], generator=torch.Generator().manual_seed(seed)
        )
    )
    loss, metrics, errors = quantile_td(
        fragment,
        actor,
        target,
        gamma=0.9,
        double=double,
        n_steps=n,
        burn_in=burn_in,
        weight=weight,
        huber=huber,
    )
    own = slow_quantiles(actor, fragment, burn_in)
    other = slow_quantiles(target, fragment, burn_in)
    terms = []
    means = []
    slow = torch.zeros(n_steps, n_envs)
    for t, b in own:
        if t < burn_in:
            continue
        goals = slow_goals(fragment, own, other, double, 0.9, n, t, b)
        values = own[t, b][0][int(fragment.state.act[t + 1, b]) - 2]
        terms.append(
            slow_penalty(goals, values, huber)
            * (1.0 if weight is None else num(weight[b] if weighted == 1 else weight[t, b]))
        )
        means.append((sum(goals) / N, num(values.mean())))
        slow[t, b] = means[-1][0] - means[-1][1]
    assert_same_loss(loss, sum(terms) / len(terms), [actor])
    torch.testing.assert_close(errors, slow, rtol=1e-4, atol=1e-5)
    assert not any(p.grad is not None for p in target.parameters())
    assert_metrics(
        metrics,
        loss=loss,
        q_target=sum(g for g, _ in means) / len(means),
        q_mean=sum(v for _, v in means) / len(means),
        td_error=sum(abs(g - v) for g, v in means) / len(means),
    )


@settings(deadline=None, max_examples=25)
@given(
    goals=st.lists(st.floats(-5, 5), min_size=1, max_size=6),
    values=st.lists(st.floats(-5, 5), min_size=1, max_size=6),
    huber=st.sampled_from([0, 0.25, 1.0, 9.0]),
)
def test_penalty(goals, values, huber):
    fast = quantile_penalty(*(torch.tensor(x, dtype=torch.float64) for x in (goals, values)), huber)
    assert float(fast) == pytest.approx(float(slow_penalty(goals, values, huber)), abs=1e-9)


def test_the_best_quantiles_are_those_of_the_samples():
    "Of 0, 1, ... 9 the levels 1/10, 3/10, ... are 0 to 1, 2 to 3, ...: no other numbers cost less."
    goals = torch.arange(10.0)
    best = quantile_penalty(goals, torch.tensor([0.5, 2.5, 4.5, 6.5, 8.5]), 0)
    for i in range(5):
        for by in (-1.0, 1.0):
            moved = torch.tensor([0.5, 2.5, 4.5, 6.5, 8.5])
            moved[i] += by
            assert quantile_penalty(goals, moved, 0) > best


# --- the network


def test_a_table_of_integers_moves_only_where_it_was():
    policy = QuantilePolicy.for_env((Discrete(7), Discrete(3)), n_quantiles=4, hidden=(), seed=0)
    w = policy.head.advantage.last.weight
    (grad,) = torch.autograd.grad(policy.quantiles_of(torch.tensor([[2]]))[0, 0, 1].sum(), w)
    assert sorted(map(tuple, grad.nonzero().tolist())) == [(k, 2) for k in range(4, 8)]


# --- the learner


def same(x, y):
    return all(
        torch.equal(a, b)
        for a, b in zip(x.state_dict().values(), y.state_dict().values(), strict=True)
    )


def agent_and_pipe(env="CartPole-v1", seed=0, memory=None, **options):
    actor = QuantilePolicy.for_env(env, n_quantiles=4, hidden=(8,), seed=seed)
    pipe = replayed(
        env, actor, n_envs=2, n_steps=4, batch_size=16, warmup=16, seed=seed, **(memory or {})
    )
    return QRDQN(actor, eps_steps=100, **options), pipe


def test_priorities_several_steps_and_the_target():
    agent, pipe = agent_and_pipe(
        multi_step=3, target_every=3, beta_steps=80, memory=dict(length=3, prioritized=True)
    )
    for batch in islice(pipe, 8):
        metrics = check_metrics(agent.update(batch))
    assert 0 < metrics["weight_min"] <= 1 and metrics["beta"] > 0.4
    assert (
        agent.gradient_steps == 7
        and agent.target_updates == 2
        and not same(agent.actor, agent.target)
    )
    with pytest.raises(DataError, match="QRDQN: samples are too short"):
        agent.learn(Sample(short(), None, None))


def short():
    "A fragment of one step."
    return next(
        iter(replayed("CartPole-v1", QuantilePolicy.for_env("CartPole-v1"), n_envs=1, n_steps=1))
    ).fresh


def test_one_quantile_has_the_errors_of_dqn():
    "The mean of one number is the number: targets and errors are those of `td`."
    with seeded(1):
        actor = QuantilePolicy(OBS, CHOICE, 1, **SMALL)
    fragment = random_fragment(3, 6, 4, actor)
    for double in (False, True):
        options = dict(gamma=0.9, double=double, n_steps=2)
        one, two = (
            loss(fragment, actor, shaken(actor, 5), **options) for loss in (td, quantile_td)
        )
        torch.testing.assert_close(one[2], two[2])


@pytest.mark.slow
def test_rainbow_learns_cartpole():
    "All parts at once. What the preset reaches with five seeds stands in its file; here it must learn at all, where chance gets 22."
    config = make_config("qr_dqn", "CartPole-v1", preset="rainbow", seed=10)
    agent, pipe = build(config)
    for batch in pipe:
        agent.update(batch)
        if agent.steps >= config["steps"]:
            break
    assert evaluate("CartPole-v1", agent.actor, 20, seed=1000).mean > 195
