"NPG against dense Fisher matrices, which `test_trpo.py` makes by sums over actions, against theory, and beside TRPO."

import copy
import itertools
import math

import pytest
import torch
from test_trpo import KINDS, Tiny, clean, close, make_fragment, oracle, vector

from rollpipe.agents import evaluate
from rollpipe.agents.natural_gradient import NPG, TRPO
from rollpipe.layers import Critic, MLPPolicy
from rollpipe.layers.recurrent import RecurrentPolicy
from rollpipe.pipes import on_policy


def example(kind, T=6):
    "A policy, always the same one, and data of another one."
    torch.manual_seed(0)
    policy = Tiny(kind)
    other = Tiny(kind)
    return policy, make_fragment(policy, T, share=0.8, behaviour=other)


# ---- the step


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damping", [0.1, 1.0])
@pytest.mark.parametrize("lr", [None, 0.01])
def test_the_step_solves_the_dense_system(kind, damping, lr):
    policy, f = example(kind)
    g, F = oracle(policy, f)
    damped = F + damping * torch.eye(len(g), dtype=torch.double)
    x = torch.linalg.solve(damped, g)
    before = vector(policy)
    m = NPG(policy, max_kl=1e-3, lr=lr, damping=damping, cg_iters=10 * len(g)).update(f)
    length = math.sqrt(2e-3 / float(g @ x)) if lr is None else lr
    close(vector(policy) - before, length * x)
    assert m["predicted_improvement"] == pytest.approx(length * float(g @ x), rel=1e-6)
    assert m["curvature"] == pytest.approx(float(x @ damped @ x), rel=1e-6) and m[
        "grad_norm"
    ] == pytest.approx(float(g.norm()))


# ---- beside TRPO


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "env, cls, kw",
    [
        ("CartPole-v1", MLPPolicy, {}),
        ("Pendulum-v1", MLPPolicy, dict(fvp_subsample=0.5)),
        ("CartPole-v1", RecurrentPolicy, {}),
    ],
)
def test_it_is_trpo_where_the_search_accepts_the_whole_step(env, cls, kw):
    actors = [cls.for_env(env, seed=1) for _ in range(2)]
    critics = [Critic.for_env(env, seed=2) for _ in range(2)]
    npg, trpo = (
        make(a, c, seed=3, max_kl=5e-3, **kw) for make, a, c in zip((NPG, TRPO), actors, critics)
    )
    whole = 0
    for batch in itertools.islice(
        on_policy(env, actors[0], critics[0], n_envs=4, n_steps=64, seed=4), 4
    ):
        trpo.load_state_dict(copy.deepcopy(npg.state_dict()))
        m = npg.update(batch)
        n = trpo.update(batch)
        if n.pop("backtracks") == 0 and n["accepted"]:
            whole += 1
            assert clean(m) == clean(n) and torch.equal(vector(npg.actor), vector(trpo.actor))
            assert torch.equal(vector(npg.critic), vector(trpo.critic))
    assert whole


# ---- when nothing is to be done, or something is wrong


def test_a_step_to_nowhere_is_undone():
    policy, f = example("gaussian")
    before = vector(policy)
    m = NPG(policy, lr=1e300).update(f)
    assert torch.equal(vector(policy), before)
    assert {
        k: m[k]
        for k in ("accepted", "kl", "step_size", "predicted_improvement", "actual_improvement")
    } == dict(accepted=0, kl=0, step_size=0, predicted_improvement=0, actual_improvement=0)
    assert NPG(policy).update(f)["accepted"] == 1 and not torch.equal(vector(policy), before)


# ---- learning


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_it_solves_cartpole_with_its_defaults(seed):
    actor = MLPPolicy.for_env("CartPole-v1", seed=seed)
    critic = Critic.for_env("CartPole-v1", seed=seed + 100)
    agent = NPG(actor, critic, seed=seed)
    steps = 0
    for batch in on_policy("CartPole-v1", actor, critic, seed=seed):
        agent.update(batch)
        steps += int(batch.valid.sum())
        if steps >= 100_000:
            break
    assert evaluate("CartPole-v1", actor, 20, seed=1000 + seed).returns.mean() >= 475
