"A network near its present parameters: vectors of parameters, Jacobians and Fisher matrices against dense ones, blocks of rows."

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import grad

from rollpipe.agents.linearization import (
    Linearization,
    assign,
    fisher_product,
    flat_vector,
    in_row_blocks,
    score_layers,
    score_preconditioner,
    unflatten,
)
from rollpipe.layers import MLPPolicy
from rollpipe.layers.heads import Categorical, Gaussian, GaussianParams, Joint
from rollpipe.pipes import nested

few = settings(deadline=None, max_examples=25)
seeds = st.integers(0, 2**31 - 1)


# ---- vectors


def test_flatten_takes_tensors_in_any_memory_order_and_copies():
    x = torch.arange(6.0).view(2, 3).T
    vector = flat_vector([x])
    assert vector.tolist() == [0, 3, 1, 4, 2, 5]
    vector.zero_()
    assert x.sum() == 15
    assign([x], torch.arange(6.0))
    assert x.tolist() == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="expected a vector of 6"):
        assign([x], torch.zeros(2, 3))


# ---- Fisher-vector products


class Net(nn.Module):
    "Nested distribution parameters of a small network, with a parameter, a buffer and a head that play no part."

    def __init__(self, head, width=5):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.logits = nn.Linear(width, 4)
        self.mean = nn.Linear(width, 2)
        self.std = nn.Linear(width, 2)
        self.log_std = nn.Parameter(torch.tensor([-0.3, 0.2]))
        self.value = nn.Linear(width, 1)
        self.register_buffer("count", torch.zeros(()))
        self.head = head
        self.double()

    def forward(self, x):
        h = self.body(x)
        mean = self.mean(h)
        free = GaussianParams(mean, self.log_std.expand_as(mean))
        return {
            "categorical": lambda: self.logits(h),
            "free": lambda: free,
            "fixed": lambda: GaussianParams(mean, torch.zeros_like(mean)),
            "state": lambda: GaussianParams(
                mean, nn.functional.softplus(self.std(h)).clamp(0.3, 10).log()
            ),
            "nested": lambda: {"move": free, "jump": (self.logits(h), [self.logits(h.sin())])},
        }[self.head]()


DISTS = {
    "categorical": Categorical(4),
    "free": Gaussian((2,)),
    "fixed": Gaussian((2,)),
    "state": Gaussian((2,)),
    "nested": Joint({"move": Gaussian((2,)), "jump": (Categorical(4), [Categorical(4)])}),
}


def problem(head, seed, n=7):
    torch.manual_seed(seed)
    net = Net(head)
    x = torch.randn(n, 3, dtype=torch.double)
    weights = torch.rand(n, dtype=torch.double)
    params = list(net.parameters())
    return net, x, weights / weights.sum(), params, Linearization(net(x), params)


def dense(product, size):
    return torch.stack([product(e) for e in torch.eye(size, dtype=torch.double)])


@pytest.mark.parametrize("head", DISTS)
def test_product_is_the_hessian_of_the_kl(head):
    net, x, weights, params, lin = problem(head, 0)
    fisher = fisher_product(lin, DISTS[head].fisher, weights)
    old = nested.map(torch.Tensor.detach, net(x))
    kl = (weights * DISTS[head].kl(old, net(x))).sum()
    slope = [g for g in grad(kl, params, create_graph=True, allow_unused=True)]
    for seed in range(4):
        v = torch.randn(
            flat_vector(params).numel(),
            generator=torch.Generator().manual_seed(seed),
            dtype=torch.double,
        )
        gv = sum((g * d).sum() for g, d in zip(slope, unflatten(v, params)) if g is not None)
        hv = grad(gv, params, retain_graph=True, allow_unused=True)
        want = flat_vector([torch.zeros_like(p) if h is None else h for p, h in zip(params, hv)])
        torch.testing.assert_close(fisher(v), want, rtol=1e-9, atol=1e-12)


@few
@given(st.sampled_from(sorted(DISTS)), seeds, st.integers(1, 6))
def test_jvp_is_a_difference_quotient_and_vjp_its_transpose(head, seed, n):
    net, x, _, params, lin = problem(head, seed, n)
    g = torch.Generator().manual_seed(seed)
    v = torch.randn(flat_vector(params).numel(), generator=g, dtype=torch.double)
    c = nested.map(lambda y: torch.randn(y.shape, generator=g, dtype=torch.double), lin.outputs)
    got = lin.jvp(v)
    theta = flat_vector(params)
    eps = 1e-6
    nested.Form(lin.outputs, "jvp").check(got)
    left = sum(float((a * b).sum()) for a, b in zip(nested.leaves(c), nested.leaves(got)))
    assert left == pytest.approx(float(lin.vjp(c) @ v), rel=1e-9, abs=1e-12)
    with torch.no_grad():
        assign(params, theta + eps * v)
        up = nested.map(torch.clone, net(x))
        assign(params, theta - eps * v)
        down = nested.map(torch.clone, net(x))
    for jv, a, b in zip(*map(nested.leaves, (got, up, down))):
        torch.testing.assert_close(jv, (a - b) / (2 * eps), rtol=1e-4, atol=1e-5)


@few
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 1), seeds)
def test_blocks_of_rows_change_nothing(n, size, dim, seed):
    net, _, _, params, _ = problem("nested", seed)
    x = torch.randn(n, 2, 3, dtype=torch.double).transpose(0, dim)
    calls = []

    def forward(rows):
        calls.append(rows["x"].shape[dim])
        return net(rows["x"])

    whole, blocks = (
        Linearization(y, params) for y in (net(x), in_row_blocks(forward, {"x": x}, size, dim))
    )
    assert (
        sum(calls) == n and max(calls) - min(calls) <= 1 and len(calls) == max(1, round(n / size))
    )
    nested.Form(whole.outputs, "outputs").check(blocks.outputs)
    v = torch.randn(flat_vector(params).numel(), dtype=torch.double)
    products = [fisher_product(lin, DISTS["nested"].fisher, 1 / n)(v) for lin in (whole, blocks)]
    torch.testing.assert_close(*products)
    gradients = [
        lin.gradient(lambda p: p["move"].mean.square().sum() + p["jump"][0].exp().sum())
        for lin in (whole, blocks)
    ]
    torch.testing.assert_close(*gradients)


def test_outputs_that_are_linear_in_nothing_used_give_a_zero_jvp():
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    lin = Linearization([a * 2], [b])
    assert lin.jvp(torch.ones(2))[0].tolist() == [0.0, 0.0] and lin.vjp(
        [torch.ones(2)]
    ).tolist() == [0.0, 0.0]


def test_a_parameter_may_be_an_output_itself():
    a = torch.ones(2, requires_grad=True)
    lin = Linearization((a, a * a), [a])
    assert [y.tolist() for y in lin.jvp(torch.tensor([1.0, 2.0]))] == [[1.0, 2.0], [2.0, 4.0]]
    assert lin.vjp((torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))).tolist() == [1.0, 2.0]


def test_products_work_under_no_grad_and_refuse_changed_parameters():
    net, x, weights, params, lin = problem("categorical", 6)
    product = fisher_product(lin, DISTS["categorical"].fisher, weights)
    v = torch.randn(flat_vector(params).numel(), dtype=torch.double)
    with torch.no_grad():
        assert torch.equal(product(v), product(v))
    assign(params, flat_vector(params) + 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product(v)


def test_outputs_stay_what_they_were_when_the_parameters_change():
    net, x, _, params, lin = problem("free", 8)
    before = nested.map(torch.clone, lin.outputs)
    assign(params, flat_vector(params) + 1)  # the log standard deviation is an expanded parameter
    assert all(map(torch.equal, nested.leaves(before), nested.leaves(lin.outputs)))


# ---- a preconditioner from the scores of rows

SEEN = gym.spaces.Box(-np.inf, np.inf, (3,))
ACTIONS = dict(
    categorical=(gym.spaces.Discrete(3), {}),
    gaussian=(gym.spaces.Box(-2, 3, (2,)), {}),
    state=(gym.spaces.Box(-2, 3, (2,)), dict(std="state")),
    scalar=(gym.spaces.Box(-1, 1, ()), {}),
    matrix=(gym.spaces.Box(-1, 1, (2, 2)), {}),
    hybrid=(
        gym.spaces.Dict(
            a=gym.spaces.Discrete(2),
            b=gym.spaces.Tuple((gym.spaces.Box(-1, 1, (1,)), gym.spaces.MultiBinary(2))),
        ),
        {},
    ),
)


def scored(space, m=7, **kw):
    "A policy in double precision, its parameters, and a function from rows to the log-probabilities of actions that it took."
    policy = MLPPolicy(SEEN, space, **kw).double()
    obs = torch.randn(1, m, 3).double()
    policy.features = lambda obs: obs  # the encoder makes float32

    def ask(rows):
        return policy.params(obs[:, rows], None, None, None, hx=(), stepno=None)[0]

    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.3 * torch.randn(p.shape, dtype=p.dtype))
        act = policy.dist.sample(
            ask(slice(None)), policy.dist.noise((1, m), torch.Generator().manual_seed(0))
        )

    def log_prob(rows=slice(None)):
        return policy.dist.log_prob(ask(rows), nested.getitem(act, (slice(None), rows)))

    return policy, list(policy.parameters()), log_prob


@pytest.mark.parametrize("kind", ACTIONS)
@pytest.mark.parametrize("m", [1, 7, 150])
def test_score_preconditioner_is_the_dense_inverse(kind, m):
    torch.manual_seed(1)
    space, options = ACTIONS[kind]
    _, params, log_prob = scored(space, m, hidden=(4, 5), **options)
    S = torch.stack(
        [
            torch.cat(
                [
                    torch.zeros_like(p).flatten() if g is None else g.flatten()
                    for p, g in zip(
                        params, grad(log_prob(slice(i, i + 1)).sum(), params, allow_unused=True)
                    )
                ]
            )
            for i in range(m)
        ]
    )
    solve = score_preconditioner(score_layers(log_prob, params), params, 0.2)
    r = torch.randn(S.shape[1]).double()
    torch.testing.assert_close(
        solve(r),
        torch.linalg.solve(S.T @ S / m + 0.2 * torch.eye(S.shape[1]).double(), r),
        rtol=1e-9,
        atol=1e-9,
    )


def test_frozen_parameters_and_parameters_that_play_no_part_are_left_out():
    torch.manual_seed(1)
    policy, params, log_prob = scored(gym.spaces.Discrete(3), hidden=(4,))
    idle = nn.Parameter(torch.ones(2).double())
    policy.trunk.hidden[0].requires_grad_(False)
    policy.head.logits.bias.requires_grad_(False)
    params = [p for p in policy.parameters() if p.requires_grad] + [idle]
    S = torch.stack(
        [
            torch.cat([g.flatten() for g in grad(log_prob(slice(i, i + 1)).sum(), params[:-1])])
            for i in range(7)
        ]
    )
    solve = score_preconditioner(score_layers(log_prob, params), params, 0.2)
    r = torch.randn(S.shape[1] + 2).double()
    torch.testing.assert_close(
        solve(r)[:-2],
        torch.linalg.solve(S.T @ S / 7 + 0.2 * torch.eye(S.shape[1]).double(), r[:-2]),
    )
    torch.testing.assert_close(solve(r)[-2:], r[-2:] / 0.2)


def test_what_the_layers_do_not_explain_has_no_preconditioner():
    x = torch.randn(6, 3).double()
    layer = nn.Linear(3, 3).double()
    scale = nn.Parameter(torch.ones(3).double())
    params = [*layer.parameters(), scale]

    def scores(out):
        return score_layers(out, params)

    assert scores(lambda: layer(x * scale.expand(6, 3)).sum(-1)) is not None
    for out in (
        lambda: layer(x * scale).sum(-1),
        lambda: layer(layer(x)).sum(-1),
        lambda: layer(x).sum(-1) + layer.bias.square().sum(),
        lambda: layer(x.repeat(2, 1)).view(2, 6, 3).sum((0, 2)),
        lambda: (x @ layer.weight).sum(-1),
        lambda: (layer(x) * (1 + scale.expand(6, 3)) * scale).sum(-1),
        lambda: layer(x).sum(-1) * layer.weight.sum(),
    ):
        assert scores(out) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_make_no_preconditioner(bad):
    x = torch.randn(6, 3)
    layer = nn.Linear(3, 1)
    x[2, 1] = bad
    layers = score_layers(lambda: layer(x)[:, 0], list(layer.parameters()))
    assert layers is None or score_preconditioner(layers, list(layer.parameters()), 0.1) is None
