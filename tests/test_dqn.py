"DQN and tabular Q-learning: updates checked by hand, the time of every copy, and that a limit is no end."

import copy
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete
from toys import Scripted

from rollpipe.agents import evaluate
from rollpipe.agents.metrics import check_metrics
from rollpipe.agents.off_policy.q_learner import DQN
from rollpipe.agents.shared_options import Schedule
from rollpipe.agents.tabular import QLearning, TabularQ, move_towards, q_targets
from rollpipe.layers import QPolicy, RecurrentQPolicy
from rollpipe.pipes import DataError, EnvStepper, Fragment, FragmentCollector
from rollpipe.pipes.graph.modules import version_of
from rollpipe.pipes.replay.memory import Sample
from rollpipe.pipes.replay.pipe import Replay


def transitions(*rows, truncated=()):
    "A fragment [1, n] of rows (state, action, reward, next state, terminated); `truncated`: numbers of rows that a limit cut off."
    s, a, r, after, term = (torch.tensor(x) for x in zip(*rows))
    cut = torch.zeros(len(s), dtype=torch.bool)
    cut[list(truncated)] = True
    first = torch.where(cut, 0, after)  # a limit was followed by a reset to state 0
    return Fragment.from_steps(
        torch.stack([s, first]),
        a[None],
        r[None],
        term[None],
        cut[None],
        last_obs=after[cut & ~term],
    )


def network(values):
    "A linear network over one-hot states with these values [n_states, n_actions]."
    net = QPolicy(Discrete(len(values)), Discrete(len(values[0])), hidden=())
    with torch.no_grad():
        net.head.last.weight.copy_(torch.tensor(values).T)
        net.head.last.bias.zero_()
    return net


def table_of(net):
    "The values [n_states, n_actions] of a network over one-hot states."
    n = net.encoder.n_out
    with torch.no_grad():
        return net.q(torch.arange(n)[None], None, None, None, hx=None)[0][0]


# One state, one action that pays 1, no end but a limit of 3 steps. Worth 1 / (1 - gamma).
Limited = partial(
    Scripted,
    [(3, "trunc")],
    observation_space=Discrete(1),
    action_space=Discrete(1),
    see=0,
    pay=1.0,
)
# The same, but the third step is the end. The state is the number of the step.
Ending = partial(
    Scripted,
    [(3, "term")],
    observation_space=Discrete(4),
    action_space=Discrete(1),
    see=lambda env: env.count,
    pay=1.0,
)


def stream(env, actor, n_envs=2, n_steps=4, seed=0, **kwargs):
    return FragmentCollector(EnvStepper(env, actor, n_envs, seed=seed, **kwargs), n_steps)


def replayed(
    env,
    actor,
    batch_size=32,
    n_batches=1,
    warmup=8,
    capacity=1000,
    length=1,
    prioritized=False,
    **kwargs,
):
    return Replay(
        stream(env, actor, **kwargs),
        capacity,
        batch_size,
        n_batches=n_batches,
        warmup=warmup,
        length=length,
        prioritized=prioritized,
        seed=0,
    )


# --- one update


def test_update_of_a_chain_by_hand():
    "s0 --a1--> s1 --a0--> end, paying 0 and 2; errors 1.5 - 1 and 2 - 3; squared loss; gradient -2 error / n for its own entry."
    agent = DQN(network([[0.0, 1.0], [3.0, 1.0]]), gamma=0.5, huber=None, lr=0.1, double=False)
    before = table_of(agent.actor)
    metrics = check_metrics(agent.update(transitions((0, 1, 0.0, 1, False), (1, 0, 2.0, 0, True))))
    assert metrics["loss"] == pytest.approx((0.5**2 + 1) / 2) and metrics[
        "td_error"
    ] == pytest.approx(0.75)
    assert metrics["q_mean"] == pytest.approx(2.0) and metrics["q_target"] == pytest.approx(1.75)
    assert metrics["grad_norm"] == pytest.approx(
        (0.5**2 + 1.0 + 0.5**2 + 1.0) ** 0.5
    )  # weights, and the bias of each action
    assert (table_of(agent.actor) - before).sign().tolist() == [
        [-1, 1],
        [-1, 1],
    ]  # the biases move the others along


@pytest.mark.parametrize("double, target", [(False, 7.0), (True, 3.0)])
def test_double_values_the_action_of_the_network(double, target):
    "The network prefers action 0, which the target network holds for worth 3; the target network's own favourite is worth 7."
    agent = DQN(network([[0.0, 0.0], [5.0, 1.0]]), gamma=1.0, double=double, huber=None)
    agent.target = network([[0.0, 0.0], [3.0, 7.0]])
    assert agent.update(transitions((0, 0, 0.0, 1, False)))["q_target"] == pytest.approx(target)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("learn", ["dqn", "tabular"])
@pytest.mark.parametrize("env, values", [(Limited, [10.0]), (Ending, [2.71, 1.9, 1.0])])
def test_values_under_a_limit_and_at_an_end(env, values, learn):
    "gamma = 0.9. A learner that takes the limit for an end finds 2.71 or less where 10 is right."
    if learn == "tabular":
        actor = TabularQ.for_env(env)
        agent = QLearning(actor, lr=0.5, gamma=0.9)
        batches = islice(stream(env, actor), 60)
    else:
        actor = QPolicy.for_env(env, hidden=(), seed=0)
        agent = DQN(actor, lr=0.03, gamma=0.9, huber=None, target_every=5)
        batches = islice(replayed(env, actor, n_batches=8, capacity=200), 100)
    for batch in batches:
        agent.update(batch)
    found = actor.table.detach() if learn == "tabular" else table_of(actor)
    assert found[: len(values), 0].tolist() == pytest.approx(values, rel=0.03)


def test_weights_of_the_samples_enter_the_loss():
    fragment = transitions((0, 1, 0.0, 1, False), (1, 0, 2.0, 0, True))
    agent = DQN(network([[0.0, 1.0], [3.0, 1.0]]), gamma=0.5, huber=None)
    metrics = agent.learn(Sample(fragment, torch.tensor([1.0, 0.5]), None))
    assert float(metrics["loss"]) == pytest.approx((0.5**2 + 0.5 * 1) / 2)


# --- the target network


def same(x, y):
    return all(torch.equal(a, b) for a, b in zip(x.state_dict().values(), y.state_dict().values()))


def test_hard_target_is_copied_when_it_is_due():
    agent = DQN(network([[0.0, 1.0], [3.0, 1.0]]), target_every=3)
    equal = []
    for _ in range(7):
        agent.learn(Sample(transitions((0, 1, 0.0, 1, False)), None, None))
        equal.append(same(agent.actor, agent.target))
    assert equal == [False, False, True, False, False, True, False] and agent.target_updates == 2


def test_polyak_target_is_an_average():
    agent = DQN(network([[0.0, 1.0], [3.0, 1.0]]), tau=0.1)
    average = {name: x.clone() for name, x in agent.target.named_parameters()}
    for _ in range(5):
        agent.learn(Sample(transitions((0, 1, 0.0, 1, False)), None, None))
        for name, x in agent.actor.named_parameters():
            average[name] += 0.1 * (x.detach() - average[name])
    for name, x in agent.target.named_parameters():
        torch.testing.assert_close(x, average[name])
    assert not any(p.requires_grad for p in agent.target.parameters())


# --- exploration


def test_epsilon_follows_the_steps_consumed():
    actor = QPolicy.for_env("CartPole-v1", hidden=(4,), seed=0)
    agent = DQN(actor, eps_start=0.8, eps_end=0.2, eps_steps=60)
    seen = [
        agent.update(batch)["epsilon"]
        for batch in islice(replayed("CartPole-v1", actor, n_envs=4, n_steps=5, warmup=40), 5)
    ]
    assert seen == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.2])
    assert Schedule("linear", 0.4, 1.0, 60)(30) == pytest.approx(0.7)


@pytest.mark.parametrize("env, make", [("CartPole-v1", QPolicy), (Ending, TabularQ)])
def test_evaluation_is_greedy_whatever_epsilon_is(env, make):
    actor = make.for_env(env, seed=0)
    results = []
    for epsilon in (0.0, 1.0):
        actor.epsilon.fill_(epsilon)
        results.append(evaluate(env, actor, 6, seed=0).returns.tolist())
    assert results[0] == results[1]
    if make is QPolicy:
        noisy = evaluate(env, actor, 6, seed=0, deterministic=False).returns.tolist()
        assert noisy != results[0]


# --- replay


def test_priorities_are_told_and_beta_rises():
    actor = QPolicy.for_env("CartPole-v1", hidden=(8,), seed=0)
    agent = DQN(actor, beta_steps=80, gamma=0.9)
    told = []
    for batch in islice(
        replayed("CartPole-v1", actor, n_envs=4, n_steps=5, warmup=20, prioritized=True), 5
    ):
        known = batch.memory.prioritize
        batch.memory.prioritize = lambda index, td_abs, known=known: (
            told.append((index, td_abs)),
            known(index, td_abs),
        )
        metrics = agent.update(batch)
        del batch.memory.prioritize
    assert metrics["beta"] == pytest.approx(1.0) and 0 < metrics["weight_min"] <= 1
    assert len(told) == 5 and all(
        len(index) == 32 and (td_abs >= 0).all() for index, td_abs in told
    )


def test_without_steps_beta_is_1_at_once():
    actor = QPolicy.for_env("CartPole-v1", hidden=(8,), seed=0)
    for beta_steps, beta in ((0, 1.0), (None, 0.4)):
        batch = next(
            iter(replayed("CartPole-v1", actor, n_envs=4, n_steps=5, warmup=20, prioritized=True))
        )
        assert DQN(actor, beta_steps=beta_steps).update(batch)["beta"] == beta


@pytest.mark.slow
def test_several_steps_need_longer_samples_and_value_alike():
    "Ending pays 1 three times: sums of rewards must agree with the values of one step."
    actor = QPolicy.for_env(Ending, hidden=(), seed=0)
    agent = DQN(actor, lr=0.1, gamma=0.9, huber=None, multi_step=3, target_every=5)
    for batch in islice(replayed(Ending, actor, n_batches=4, length=3), 120):
        agent.update(batch)
    assert table_of(actor)[:3, 0].tolist() == pytest.approx([2.71, 1.9, 1.0], rel=0.03)
    with pytest.raises(DataError, match="length >= multi_step = 3"):
        agent.update(next(iter(replayed(Ending, actor))))


def test_a_sample_without_a_row_after_the_burn_in_teaches_nothing():
    "By chance all of its environments rest then."
    actor = RecurrentQPolicy.for_env("CartPole-v1", hidden=(8,), memory=8, seed=0)
    agent = DQN(actor, burn_in=3, lr=1e-2)
    pipe = replayed("CartPole-v1", actor, batch_size=8, n_envs=4, warmup=40, length=8)
    batch = next(x for x in pipe if len(x.memory) >= 40)
    fragment = batch.memory.sample(4).fragment
    before = copy.deepcopy(actor)
    resting = fragment._replace(valid=fragment.valid & (torch.arange(8) < 3).unsqueeze(1))
    assert agent.learn(Sample(resting, None, None), batch.memory) == {} and same(before, actor)
    assert agent.learn(Sample(fragment, None, None), batch.memory) and not same(before, actor)


def test_nothing_is_learned_before_the_memory_is_warm():
    actor = QPolicy.for_env("CartPole-v1", hidden=(8,), seed=0)
    agent = DQN(actor)
    before = copy.deepcopy(actor.state_dict())
    metrics = agent.update(next(iter(replayed("CartPole-v1", actor, warmup=500))))
    assert "loss" not in metrics and agent.gradient_steps == 0 and version_of(actor) == 1
    assert all(
        torch.equal(x, before[name]) for name, x in actor.state_dict().items() if name != "epsilon"
    )


# --- going on


# --- the table


def test_repeated_pairs_move_as_one_by_one_if_targets_agree():
    rng = np.random.default_rng(0)
    states = torch.from_numpy(rng.integers(4, size=50))
    actions = torch.from_numpy(rng.integers(3, size=50))
    goal = torch.from_numpy(rng.normal(size=(4, 3)))
    table = torch.from_numpy(rng.normal(size=(4, 3)))
    slow = table.clone()
    for s, a in zip(states, actions):
        slow[s, a] += 0.3 * (goal[s, a] - slow[s, a])
    move_towards(table, states, actions, goal[states, actions], 0.3)
    torch.testing.assert_close(table, slow)


def test_order_of_the_rows_does_not_matter_to_the_table():
    rng = np.random.default_rng(1)
    states, actions, targets = (
        torch.from_numpy(x)
        for x in (rng.integers(3, size=40), rng.integers(2, size=40), rng.normal(size=40))
    )
    (one, other) = torch.zeros(2, 3, 2, dtype=torch.float64)
    order = torch.from_numpy(rng.permutation(40))
    move_towards(one, states, actions, targets, 0.4)
    move_towards(other, states[order], actions[order], targets[order], 0.4)
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.int8])
def test_table_counts_states_and_actions_from_their_start(dtype):
    actor = TabularQ(Discrete(3, start=10, dtype=dtype), Discrete(2, start=5, dtype=dtype))
    fragment = transitions((10, 6, 1.0, 12, False))
    fragment = fragment._replace(
        state=fragment.state._replace(
            obs=torch.from_numpy(fragment.state.obs.numpy().astype(dtype))
        )
    )
    assert actor.predict(dtype(11))[0] in (5, 6)
    with torch.no_grad():
        actor.table[2] = torch.tensor([4.0, 8.0])
    assert q_targets(fragment, actor.table.detach(), 0.5, 10).tolist() == [[5.0]]
    QLearning(actor, lr=1.0, gamma=0.5).update(fragment)
    assert actor.table.tolist() == [[0.0, 5.0], [0.0, 0.0], [4.0, 8.0]]
