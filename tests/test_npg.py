"NPG against dense Fisher matrices, which `test_trpo.py` makes by sums over actions, against theory, and beside TRPO."

import copy
import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributions as td
from test_trpo import KINDS, Tiny, clean, close, make_fragment, oracle, vector
from torch import nn

from rollpipe.agents import evaluate
from rollpipe.agents.natural_gradient import NPG, TRPO
from rollpipe.layers import Critic, MLPPolicy
from rollpipe.layers.heads import Gaussian, GaussianParams
from rollpipe.layers.policies import Policy
from rollpipe.layers.recurrent import RecurrentPolicy
from rollpipe.pipes import on_policy
from rollpipe.pipes.data.fragment import Fragment


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


class Mean(Policy):
    "A Gaussian around `A theta` with fixed deviation, whatever it sees."

    dist = Gaussian((2,))

    def __init__(self, A, mean, std):
        super().__init__()
        self.A = A
        self.log_std = torch.full((2,), math.log(std), dtype=torch.double)
        self.theta = nn.Parameter(torch.linalg.solve(A, mean))

    @property
    def mean(self):
        return (self.A @ self.theta).detach()

    def params(self, obs, act, rew, fin, *, hx, stepno):
        mean = self.A @ self.theta
        return GaussianParams(mean.expand(*fin.shape, 2), self.log_std.expand(*fin.shape, 2)), ()


def test_on_a_quadratic_it_follows_the_recursion_of_theory_whatever_the_parameters():
    """For `A(a) = -(a - c)' Q (a - c) / 2` the gradient in the mean is `-Q (mean - c)`, the Fisher matrix is 1/std^2: a step moves the
    mean by `-lr std^2 Q (mean - c)`. Four actions, symmetric about the mean, make all these expectations exact."""
    Q = np.array([[2.0, 0.3], [0.3, 0.5]])
    c = np.array([1.0, -2.0])
    std = 0.5
    lr = 1.2
    for A in (torch.eye(2), torch.tensor([[1.0, 2.0], [-0.5, 0.3]])):
        policy = Mean(A.double(), torch.tensor([-1.0, 0.5], dtype=torch.double), std)
        mean = np.array([-1.0, 0.5])
        agent = NPG(policy, lr=lr, damping=0.0, normalize_adv=False)
        for _ in range(40):
            act = policy.mean + std * math.sqrt(2) * torch.tensor(
                [[1.0, 0], [-1, 0], [0, 1], [0, -1]], dtype=torch.double
            )
            off = act.numpy() - c
            adv = torch.from_numpy(-np.einsum("ni,ij,nj->n", off, Q, off) / 2)
            logp = td.Normal(policy.mean, std).log_prob(act).sum(-1)
            agent.update(
                Fragment.from_steps(
                    torch.zeros(2, 4, 1),
                    act[None],
                    torch.zeros(1, 4),
                    adv=adv[None],
                    ret=adv[None],
                    actor=dict(logp=torch.stack([logp, logp])),
                )
            )
            mean = mean - lr * std**2 * Q @ (mean - c)
            np.testing.assert_allclose(policy.mean.numpy(), mean, atol=1e-8)
    assert np.abs(mean - c).max() < 0.01


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


def test_it_takes_the_step_that_trpo_shortens():
    (policy, f) = example("gaussian")
    (other, _) = example("gaussian")
    m = NPG(policy, max_kl=1.0).update(f)
    n = TRPO(other, max_kl=1.0, max_backtracks=30).update(f)
    assert n["accepted"] == m["accepted"] == 1 and n["backtracks"] > 0
    assert m["step_size"] * 0.8 ** n["backtracks"] == pytest.approx(n["step_size"], rel=1e-6)
    for name in ("surrogate_before", "grad_norm", "curvature", "cg_residual", "entropy"):
        assert m[name] == n[name]


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


@pytest.mark.parametrize("lr", [None, 1.0])
def test_constant_advantages_teach_nothing(lr):
    policy, f = example("categorical")
    before = vector(policy)
    m = NPG(policy, lr=lr).update(f._replace(adv=torch.full_like(f.adv, 3.0)))
    assert torch.equal(vector(policy), before) and m["step_size"] == m["kl"] == 0


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
