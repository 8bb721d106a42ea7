"TRPO against the formula: dense Fisher matrices from sums over actions, torch.distributions, loops written out."

import copy
import itertools
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.distributions as td
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rollpipe.agents.natural_gradient import TRPO, policy_rows, subsample
from rollpipe.layers import Critic, MLPPolicy
from rollpipe.layers.heads import Categorical, Gaussian, GaussianParams, Joint
from rollpipe.layers.policies import Policy
from rollpipe.pipes import nested, on_policy
from rollpipe.pipes.data.fragment import Final, Fragment, State

N_OBS = 3
KINDS = ("categorical", "gaussian", "nested")
HERMITE = [
    (math.sqrt(2) * x, w / math.sqrt(math.pi)) for x, w in zip(*np.polynomial.hermite.hermgauss(3))
]
DISTS = dict(
    categorical=Categorical(3),
    gaussian=Gaussian((2,)),
    nested=Joint(dict(a=Categorical(2), b=(Gaussian((1,)), Categorical(3)))),
)


# ---- a tiny policy in double precision, and what torch.distributions makes of its outputs


class Net(nn.Module):
    "Observations [..., 3] -> parameters of the distribution `DISTS[kind]`, float64; two or three dozen weights."

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.n_std = dict(categorical=0, gaussian=2, nested=1)[kind]
        self.hidden = nn.Linear(N_OBS, 3).double()
        self.out = nn.Linear(3, dict(categorical=3, gaussian=2, nested=6)[kind]).double()
        if self.n_std:
            self.log_std = nn.Parameter(torch.linspace(-0.5, 0.3, self.n_std, dtype=torch.double))

    def forward(self, obs):
        return self.head(self.hidden(obs.double()).tanh())

    def head(self, x):
        y = self.out(x)
        if self.kind == "categorical":
            return y
        if self.kind == "gaussian":
            return GaussianParams(y, self.log_std.expand_as(y))
        mean = y[..., 2:3]
        return dict(
            a=y[..., :2], b=(GaussianParams(mean, self.log_std.expand_as(mean)), y[..., 3:])
        )


class Tiny(Policy):
    "Without memory."

    def __init__(self, kind):
        super().__init__()
        self.net = Net(kind)
        self.dist = DISTS[kind]
        self.shapes = []

    def params(self, obs, act, rew, fin, *, hx, stepno):
        self.shapes.append(tuple(fin.shape))
        return self.net(obs), ()

    def observe(self, obs, valid=None):
        pass


class Inert(Tiny):
    "With a recurrent state that changes nothing."

    def params(self, obs, act, rew, fin, *, hx, stepno):
        return super().params(obs, act, rew, fin, hx=(), stepno=stepno)[0], hx + 1


class Recurrent(Tiny):
    "The hidden layer has a memory, which begins anew where `fin` is set."

    def __init__(self, kind):
        super().__init__(kind)
        self.cell = nn.GRUCell(N_OBS, 3).double()

    def params(self, obs, act, rew, fin, *, hx, stepno):
        self.shapes.append(tuple(fin.shape))
        h = hx[0]
        outs = []
        for x, new in zip(obs.double(), fin):
            h = self.cell(x, torch.where(new[:, None], 0.0, h))
            outs.append(self.net.head(h))
        return nested.stack(outs), h[None]


def torch_dists(kind, p):
    "The independent parts of the joint distribution, made by torch.distributions, and the matching parts of an action."
    normal = lambda g: td.Independent(td.Normal(g.mean, g.log_std.exp()), 1)
    if kind == "categorical":
        return [td.Categorical(logits=p)], lambda act: [act]
    if kind == "gaussian":
        return [normal(p)], lambda act: [act]
    parts = [td.Categorical(logits=p["a"]), normal(p["b"][0]), td.Categorical(logits=p["b"][1])]
    return parts, lambda act: [act["a"], act["b"][0], act["b"][1]]


def log_prob(kind, p, act):
    parts, split = torch_dists(kind, p)
    return sum(d.log_prob(x) for d, x in zip(parts, split(act)))


def kl(kind, p, q):
    return sum(
        td.kl_divergence(a, b) for a, b in zip(torch_dists(kind, p)[0], torch_dists(kind, q)[0])
    )


def sample(kind, p):
    xs = [d.sample() for d in torch_dists(kind, p)[0]]
    return xs[0] if kind != "nested" else dict(a=xs[0], b=(xs[1], xs[2]))


def weighted_actions(d):
    """Actions and weights [N] of one distribution by which the mean of a polynomial up to degree 5 is exact: all
    actions, or the nodes of Gauss-Hermite quadrature."""
    if isinstance(d, td.Categorical):
        for a in range(d.logits.shape[-1]):
            yield torch.full(d.logits.shape[:-1], a), d.probs[..., a].detach()
        return
    mean = d.base_dist.loc.detach()
    std = d.base_dist.scale.detach()
    for nodes in itertools.product(HERMITE, repeat=mean.shape[-1]):
        z = torch.tensor([x for x, _ in nodes], dtype=torch.double)
        w = math.prod(w for _, w in nodes)
        yield mean + std * z, torch.full(mean.shape[:-1], w, dtype=torch.double)


def make_fragment(policy, T=5, B=4, seed=0, share=0.7, behaviour=None):
    "Random numbers in the shape of a fragment; actions are drawn from `behaviour` (default: the policy itself)."
    torch.manual_seed(seed)
    obs = torch.randn(T + 1, B, N_OBS)
    hx = () if type(policy) is Tiny else torch.randn(1, B, 3).double()
    fin = torch.rand(T + 1, B) < 0.2
    valid = torch.rand(T, B) < share
    valid[0, 0] = True
    fin[1:] |= ~valid  # what is no transition stands between episodes
    fin[:-1] |= ~valid
    kind = policy.net.kind
    with torch.no_grad():
        p = (behaviour or policy).params(obs, None, None, fin, hx=hx, stepno=None)[0]
    policy.shapes.clear()
    reacted = sample(kind, p)  # at row t; recorded one row later
    state = State(
        torch.arange(T + 1)[:, None].expand(-1, B),
        obs,
        nested.map(lambda x: x.roll(1, 0), reacted),
        torch.randn(T + 1, B),
        fin,
    )
    logp = log_prob(kind, p, reacted)
    final = Final(
        torch.zeros(0, dtype=torch.long),
        torch.zeros(0, dtype=torch.long),
        torch.zeros(0, N_OBS),
        {},
    )
    adv = torch.randn(T, B).double()
    return Fragment(
        state,
        dict(dist=p, logp=logp),
        {},
        hx,
        fin & False,
        final,
        valid,
        adv,
        adv.float() * 2 + 1,
        torch.zeros(B, dtype=torch.long),
        torch.zeros(B, dtype=torch.long),
        torch.zeros(B, dtype=torch.long),
    )


def rows_of(f):
    "Observation, action taken, normalised advantage, and old log-probability of the valid rows of a stateless fragment."
    adv = f.adv[f.valid]
    act = nested.map(lambda x: x[1:][f.valid], f.state.act)
    return (
        f.state.obs[:-1][f.valid],
        act,
        (adv - adv.mean()) / adv.std(correction=0),
        f.actor["logp"][:-1][f.valid],
    )


def vector(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def flat_grad(y, module, **kw):
    gs = torch.autograd.grad(y, list(module.parameters()), **kw)
    return torch.cat([g.flatten() for g in gs])


def oracle(policy, f, only=None):
    "Gradient [D] of the plain loss and the exact Fisher matrix [D, D] (from the rows `only`): mean of score score'."
    kind = policy.net.kind
    (obs, act, adv, old) = rows_of(f)
    loss = ((log_prob(kind, policy.net(obs), act) - old).exp() * adv).mean()
    g = flat_grad(loss, policy)
    obs = obs if only is None else obs[only]
    parts = torch_dists(kind, policy.net(obs))[0]
    F = torch.zeros(len(g), len(g), dtype=torch.double)
    for combination in itertools.product(*(list(weighted_actions(d)) for d in parts)):
        weight = math.prod(w for _, w in combination)
        logp = sum(d.log_prob(x) for d, (x, _) in zip(parts, combination))
        for n in range(len(obs)):
            score = flat_grad(logp[n], policy, retain_graph=True)
            F += weight[n] * torch.outer(score, score) / len(obs)
    return g, F


def close(a, b, tol=1e-6):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol * float(torch.as_tensor(b).abs().max()))


def updated(policy, f, **kw):
    "Metrics of one update, the change of the parameters [D], and the length of the step relative to a full one."
    agent = TRPO(policy, **dict(dict(max_kl=1e-4), **kw))
    before = vector(policy)
    m = agent.update(f)
    return m, vector(policy) - before, agent.backtrack ** m["backtracks"]


# ---- gradient, Fisher matrix, natural gradient


@pytest.mark.slow_but_one
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damping", [0.1, 1.0])
@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("precondition", [0, 6])
def test_update_is_the_dense_natural_gradient_step(kind, damping, off_policy, precondition):
    policy = Tiny(kind)
    behaviour = Tiny(kind) if off_policy else None
    f = make_fragment(policy, T=9, behaviour=behaviour)
    g, F = oracle(policy, f)
    damped = F + damping * torch.eye(len(g), dtype=torch.double)
    x = torch.linalg.solve(damped, g)
    m, delta, scale = updated(
        policy, f, cg_iters=10 * len(g), damping=damping, precondition=precondition
    )
    assert (
        m["accepted"] == 1
        and m["cg_residual"] < 1e-8
        and m.get("precondition_rows", 0) == precondition
    )
    assert m["curvature"] == pytest.approx(float(x @ damped @ x), rel=1e-6)
    close(delta, scale * x * math.sqrt(2e-4 / float(x @ damped @ x)))


@pytest.mark.parametrize("kind", KINDS)
def test_cg_iterations_are_those_of_a_loop_over_twice_back_propagated_kl(kind):
    policy = Tiny(kind)
    f = make_fragment(policy)
    obs, act, adv, old = rows_of(f)
    p = policy.net(obs)
    divergence = kl(kind, nested.map(torch.Tensor.detach, p), p).mean()
    slope = flat_grad(divergence, policy, create_graph=True)

    def product(v):
        return flat_grad(slope @ v, policy, retain_graph=True) + 0.2 * v

    g = flat_grad(((log_prob(kind, p, act) - old).exp() * adv).mean(), policy, retain_graph=True)
    x = torch.zeros_like(g)
    r = g
    d = r
    for _ in range(4):
        alpha = r @ r / (d @ product(d))
        x = x + alpha * d
        r_next = r - alpha * product(d)
        d = r_next + (r_next @ r_next) / (r @ r) * d
        r = r_next
    step = x * (2e-4 / (x @ product(x))).sqrt()
    m, delta, scale = updated(policy, f, cg_iters=4, damping=0.2)
    assert m["cg_iterations"] == 4 and m["cg_residual"] == pytest.approx(
        float(r.norm() / g.norm()), rel=1e-5
    )
    close(delta, scale * step)


# ---- fewer products


@pytest.mark.parametrize("kind", KINDS)
def test_the_preconditioner_is_made_of_the_scores_of_the_actions_taken(kind):
    policy = Tiny(kind)
    f = make_fragment(policy, T=16, share=1.1)
    agent = TRPO(policy, precondition=10, damping=0.2, seed=7)
    rows = policy_rows(f)
    picked = subsample(rows, 10 / 64, torch.Generator().manual_seed(7))
    kept = nested.map(lambda x: x[0], (picked.state.obs, picked.act))
    S = torch.stack(
        [
            flat_grad(
                log_prob(kind, policy.net(obs[None]), nested.map(lambda x: x[None], act))[0], policy
            )
            for obs, act in ((kept[0][i], nested.getitem(kept[1], i)) for i in range(10))
        ]
    )
    r = torch.randn(S.shape[1]).double()
    close(
        agent.preconditioner(rows)(r),
        torch.linalg.solve(S.T @ S / 10 + 0.2 * torch.eye(len(r)).double(), r),
    )


@pytest.mark.parametrize(
    "rows, options, found",
    [
        (4095, {}, dict(precondition=0)),
        (4096, {}, dict(precondition=512, cg_iters=5)),
        (4096, dict(cg_iters=3), dict(precondition=512, cg_iters=2)),
        (4096, dict(fvp_subsample=0.999), dict(precondition=0)),
        (8192, dict(fvp_subsample=0.5), dict(precondition=512, cg_iters=5)),
        (4096, dict(damping=0.0), dict(precondition=0)),
    ],
)
def test_the_number_of_rows_decides_about_the_preconditioner(rows, options, found):
    policy = Tiny("gaussian")
    f = make_fragment(policy, T=rows, B=1, share=1.1)
    other = copy.deepcopy(policy)
    m, delta, _ = updated(policy, f, **options)
    n, want, _ = updated(other, f, **options | found)
    assert clean(m) == clean(n) and torch.equal(delta, want)
    assert m.get("precondition_rows", 0) == found["precondition"]
    assert m["cg_iterations"] == (dict(cg_iters=10) | options | found)["cg_iters"]


def test_without_a_preconditioner_the_iterations_are_all_there():
    policy = Recurrent("categorical")
    m, _, _ = updated(policy, make_fragment(policy, T=2, B=4200, share=1.1))
    assert m["cg_iterations"] == 10 and "precondition_rows" not in m


def test_a_policy_with_convolutions_falls_back_too():
    policy = MLPPolicy(
        gym.spaces.Box(0, 255, (36, 36, 1), np.uint8),
        gym.spaces.Discrete(2),
        encoder=dict(images="conv"),
    )
    obs = torch.randint(256, (5, 4, 36, 36, 1)).byte()
    zero = torch.zeros(5, 4)
    f = Fragment.from_steps(
        obs, zero[1:].long(), zero[1:], actor=dict(logp=zero), adv=torch.randn(4, 4), ret=zero[1:]
    )
    assert TRPO(policy, precondition=8).preconditioner(policy_rows(f)) is None
    assert TRPO(policy, precondition=8).update(f)["cg_iterations"] > 0


# ---- the diagnostics


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_kl", [1e-3, 0.05, 3.0])
def test_certificate_recomputed(kind, max_kl):
    policy = Tiny(kind)
    f = make_fragment(policy, T=8, behaviour=Tiny(kind))
    before = copy.deepcopy(policy)
    obs, act, adv, old = rows_of(f)

    def surrogate(policy):
        return ((log_prob(kind, policy.net(obs), act) - old).exp() * adv).mean()

    g = flat_grad(surrogate(policy), policy)
    m, delta, _ = updated(policy, f, max_kl=max_kl)
    p = before.net(obs)
    q = policy.net(obs)
    assert m["accepted"] == 1 and m["kl"] <= max_kl
    want = dict(
        kl=kl(kind, p, q).mean(),
        surrogate_before=surrogate(before),
        surrogate_after=surrogate(policy),
        actual_improvement=surrogate(policy) - surrogate(before),
        predicted_improvement=g @ delta,
        step_size=delta.norm(),
        grad_norm=g.norm(),
        entropy=sum(d.entropy() for d in torch_dists(kind, p)[0]).mean(),
    )
    assert {k: m[k] for k in want} == pytest.approx(
        {k: float(v.detach()) for k, v in want.items()}, rel=1e-5, abs=1e-9
    )
    assert m["actual_improvement"] >= 0.1 * m["predicted_improvement"] > 0


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 2**31 - 1),
    st.floats(0.2, 1),
)
def test_every_update_is_within_the_trust_region_or_undone(kind, T, B, seed, share):
    policy = Tiny(kind)
    f = make_fragment(policy, T, B, seed, share)
    m, delta, _ = updated(policy, f, max_kl=0.02)
    assert all(math.isfinite(v) for v in m.values()) and m["kl"] <= 0.02
    assert bool(m["accepted"]) == (m["actual_improvement"] > 0) == bool(delta.any())


# ---- rows that do not count, recurrent state, subsampling


def clean(m):
    return {k: v for k, v in m.items() if not k.startswith("seconds")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.7, 1.0])
def test_an_inert_memory_changes_nothing_and_the_time_axis_is_kept(kind, share):
    plain = Tiny(kind)
    inert = Inert(kind)
    inert.load_state_dict(plain.state_dict())
    f = make_fragment(inert, share=share)
    m, delta, _ = updated(plain, f._replace(hx=()))
    n, delta_inert, _ = updated(inert, f)
    close(delta, delta_inert, 1e-5)
    assert clean(m) == pytest.approx(clean(n), rel=1e-4, abs=1e-7)
    assert set(inert.shapes) == {(5, 4)} and set(plain.shapes) == {(1, int(f.valid.sum()))}


def test_recurrent_gradient_is_that_of_a_loop_over_environments():
    policy = Recurrent("categorical")
    f = make_fragment(policy, T=7, B=3)
    kept = f.adv[f.valid]
    loss = 0.0
    adv = (f.adv - kept.mean()) / kept.std(correction=0)
    for b in range(f.n_envs):
        h = f.hx[0, b]
        for t in range(f.n_steps):
            if f.state.fin[t, b]:
                h = torch.zeros(3).double()
            h = policy.cell(f.state.obs[t, b].double(), h)
            ratio = (
                policy.net.head(h).log_softmax(-1)[f.state.act[t + 1, b]] - f.actor["logp"][t, b]
            ).exp()
            if f.valid[t, b]:
                loss = loss + ratio * adv[t, b] / int(f.valid.sum())
    g = flat_grad(loss, policy, allow_unused=True, materialize_grads=True)
    m, delta, _ = updated(policy, f, cg_iters=1)
    assert m["accepted"] == 1 and m["grad_norm"] == pytest.approx(float(g.norm()), rel=1e-5)
    close(delta / delta.norm(), g / g.norm(), 1e-5)


def test_a_recurrent_policy_gives_every_environment_its_own_state():
    "Many environments are worked through in blocks; each must meet its own recurrent state there."
    policy = Recurrent("gaussian")
    f = make_fragment(policy, T=3, B=2000, share=1.0)
    q = copy.deepcopy(policy)
    m, delta, _ = updated(policy, f)
    with torch.no_grad():
        old, new = (
            x.params(f.state.obs[:-1], None, None, f.state.fin[:-1], hx=f.hx, stepno=None)[0]
            for x in (q, policy)
        )
    assert m["surrogate_before"] == pytest.approx(0, abs=1e-6) and delta.any()
    assert m["kl"] == pytest.approx(float(kl("gaussian", old, new).mean()), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_subsampling_thins_the_fisher_matrix_and_nothing_else(kind):
    policy = Tiny(kind)
    f = make_fragment(policy)
    before = copy.deepcopy(policy)
    n = int(f.valid.sum())
    (obs, act, adv, old) = rows_of(f)
    curvatures = []
    for row in range(n):
        g, F = oracle(policy, f, only=[row])
        curvatures.append(float((g @ g) ** 2 / (g @ F @ g + 0.1 * g @ g)))
    m, delta, _ = updated(policy, f, cg_iters=1, fvp_subsample=1 / n)
    assert m["accepted"] == 1 and any(
        m["curvature"] == pytest.approx(c, rel=1e-6) for c in curvatures
    )
    close(delta / delta.norm(), g / g.norm())
    p = before.net(obs)
    q = policy.net(obs)
    assert m["grad_norm"] == pytest.approx(float(g.norm()), rel=1e-6)
    assert m["kl"] == pytest.approx(float(kl(kind, p, q).mean().detach()), rel=1e-5)
    after = ((log_prob(kind, q, act) - old).exp() * adv).mean()
    assert m["surrogate_after"] == pytest.approx(float(after.detach()), rel=1e-5)
    assert m["entropy"] == pytest.approx(
        float(sum(d.entropy() for d in torch_dists(kind, p)[0]).mean().detach()), rel=1e-5
    )


def test_thinned_environments_of_a_recurrent_policy_stay_whole():
    policy = Recurrent("gaussian")
    f = make_fragment(policy, T=6, B=8)
    rows = policy_rows(f)
    few = subsample(rows, 0.5, torch.Generator().manual_seed(1))
    assert (
        few.adv.shape == (6, 4)
        and few.hx.shape == (1, 4, 3)
        and float(few.weight.sum()) == pytest.approx(1)
    )
    columns = [(f.hx[0] == h).all(-1).nonzero().item() for h in few.hx[0]]
    valid = f.valid[:, columns]
    assert torch.equal(few.state.obs[valid], f.state.obs[:-1, columns][valid])
    assert torch.equal(few.weight > 0, valid)
    m, _, _ = updated(policy, f, fvp_subsample=0.5)
    assert m["accepted"] == 1


def test_thinned_environments_have_valid_rows():
    policy = Recurrent("gaussian")
    f = make_fragment(policy, T=6, B=8, share=1.0)
    valid = torch.zeros_like(f.valid)
    valid[:, 2] = True
    m, _, _ = updated(policy, f._replace(valid=valid), cg_iters=1, fvp_subsample=0.1)
    assert m["curvature"] < 0.99 * m["grad_norm"] ** 2 / 0.1  # which it would be with damping alone


# ---- when nothing is to be done, or something is wrong


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_line_search_restores_every_bit(kind):
    policy = Tiny(kind)
    m, delta, _ = updated(policy, make_fragment(policy), accept_ratio=1e9, max_backtracks=4)
    want = dict(
        accepted=0, kl=0, step_size=0, predicted_improvement=0, actual_improvement=0, backtracks=4
    )
    assert not delta.any() and {k: m[k] for k in want} == want
    assert m["surrogate_after"] == m["surrogate_before"]
    assert m["grad_norm"] > 0 and m["curvature"] > 0


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e4])
@pytest.mark.parametrize("n", [1, 2, 7, 20])
def test_constant_advantages_teach_nothing(value, n):
    policy = Tiny("gaussian")
    f = make_fragment(policy, share=1.1)
    valid = (torch.arange(20) < n).view_as(f.valid)
    constant = torch.full_like(f.adv, value)
    m, delta, _ = updated(policy, f._replace(adv=constant, valid=valid))
    assert not delta.any() and m["accepted"] == 0
    assert m["surrogate_before"] == m["surrogate_after"] == 0


def test_frozen_parameters_stay():
    policy = Tiny("gaussian")
    policy.net.log_std.requires_grad_(False)
    frozen = policy.net.log_std.clone()
    m, delta, _ = updated(policy, make_fragment(policy))
    assert m["accepted"] == 1 and delta.any() and torch.equal(policy.net.log_std, frozen)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_kl_next_is_between_the_policies_that_collect(env):
    "Also after the normaliser has moved: recomputed with torch.distributions from copies of the actor."
    actor = MLPPolicy.for_env(env, seed=3)
    critic = Critic.for_env(env, seed=4)
    agent = TRPO(actor, critic)
    for batch in itertools.islice(on_policy(env, actor, critic, n_envs=4, n_steps=64, seed=5), 3):
        before = copy.deepcopy(actor)
        metrics = agent.update(batch)
        with torch.no_grad():
            old, new = (a.replay(batch)["dist"] for a in (before, actor))
        if env == "CartPole-v1":
            p, q = (td.Categorical(logits=x) for x in (old, new))
        else:
            p, q = (td.Independent(td.Normal(x.mean, x.log_std.exp()), 1) for x in (old, new))
        assert metrics["kl_next"] == pytest.approx(
            td.kl_divergence(p, q).mean().item(), rel=1e-3, abs=1e-6
        )
    assert metrics["kl_next"] != metrics["kl"]
