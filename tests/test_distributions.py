"""Distributions against torch.distributions, autograd and counting."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions as td

from rollpipe.layers.heads import (
    Bernoulli,
    Categorical,
    Gaussian,
    GaussianParams,
    Joint,
    MultiCategorical,
)
from rollpipe.pipes import nested

fast = settings(deadline=None, max_examples=25)
leads = st.lists(st.integers(1, 3), max_size=3)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def gaussian_params(lead, shape, seed):
    g = generator(seed)
    return GaussianParams(*(torch.randn((*lead, *shape), generator=g) for _ in range(2)))


@fast
@given(lead=leads, n=st.integers(1, 5), start=st.integers(-3, 3), seed=st.integers(0, 99))
def test_categorical_agrees_with_torch(lead, n, start, seed):
    dist = Categorical(n, start)
    g = generator(seed)
    p, q = torch.randn(2, *lead, n, generator=g)
    act = dist.sample(p, dist.noise(lead, g))
    ref_p = td.Categorical(logits=p)
    ref_q = td.Categorical(logits=q)
    assert act.shape == tuple(lead) and act.dtype == torch.int64
    assert ((start <= act) & (act < start + n)).all()
    torch.testing.assert_close(dist.log_prob(p, act), ref_p.log_prob(act - start))
    torch.testing.assert_close(dist.log_prob(p, act.int()), ref_p.log_prob(act - start))
    torch.testing.assert_close(dist.entropy(p), ref_p.entropy())
    torch.testing.assert_close(dist.kl(p, q), td.kl_divergence(ref_p, ref_q), rtol=1e-4, atol=1e-5)
    assert torch.equal(dist.mode(p), p.argmax(-1) + start)


def test_actions_of_one_byte():
    params = torch.randn(200, generator=generator(0))
    assert (
        Categorical(200, -100).log_prob(params, torch.tensor(99, dtype=torch.int8))
        == params.log_softmax(-1)[199]
    )


@fast
@given(
    lead=leads, shape=st.lists(st.integers(1, 3), max_size=2).map(tuple), seed=st.integers(0, 99)
)
def test_gaussian_agrees_with_torch(lead, shape, seed):
    dist = Gaussian(shape)
    p = gaussian_params(lead, shape, seed)
    q = gaussian_params(lead, shape, seed + 100)
    noise = dist.noise(lead, generator(seed))
    act = dist.sample(p, noise)
    ref_p, ref_q = (td.Independent(td.Normal(x.mean, x.log_std.exp()), len(shape)) for x in (p, q))
    torch.testing.assert_close(act, p.mean + p.log_std.exp() * noise)
    close = dict(rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dist.log_prob(p, act), ref_p.log_prob(act), **close)
    torch.testing.assert_close(dist.entropy(p), ref_p.entropy(), **close)
    torch.testing.assert_close(dist.kl(p, q), td.kl_divergence(ref_p, ref_q), **close)
    assert torch.equal(dist.mode(p), p.mean)


@st.composite
def several(draw):
    "A `MultiCategorical` with actions of one or two dimensions."
    n = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    start = draw(st.just(()) | st.lists(st.integers(-3, 3), min_size=len(n), max_size=len(n)))
    return MultiCategorical(
        n, start, (2, len(n) // 2) if len(n) % 2 == 0 and draw(st.booleans()) else None
    )


@fast
@given(lead=leads, dist=several(), seed=st.integers(0, 99))
def test_multi_categorical_agrees_with_torch(lead, dist, seed):
    "The same as a list of `Categorical`s."
    g = generator(seed)
    start = dist.start or (0,) * len(dist.n)
    p, q = torch.randn(2, *lead, sum(dist.n), generator=g)
    act = dist.sample(p, dist.noise(lead, g))
    assert act.shape == (*lead, *dist.shape) and act.dtype == torch.int64
    ref_p, ref_q = ([td.Categorical(logits=part) for part in x.split(dist.n, -1)] for x in (p, q))
    columns = [a - s for a, s in zip(act.reshape(*lead, -1).unbind(-1), start)]
    assert all(((0 <= a) & (a < n)).all() for a, n in zip(columns, dist.n))
    close = dict(rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        dist.log_prob(p, act), sum(r.log_prob(a) for r, a in zip(ref_p, columns)), **close
    )
    torch.testing.assert_close(dist.log_prob(p, act.short()), dist.log_prob(p, act))
    torch.testing.assert_close(dist.entropy(p), sum(r.entropy() for r in ref_p), **close)
    torch.testing.assert_close(dist.kl(p, q), sum(map(td.kl_divergence, ref_p, ref_q)), **close)
    best = torch.stack([part.argmax(-1) + s for part, s in zip(p.split(dist.n, -1), start)], -1)
    assert torch.equal(dist.mode(p), best.view(*lead, *dist.shape))


@fast
@given(
    lead=leads, shape=st.lists(st.integers(1, 3), max_size=2).map(tuple), seed=st.integers(0, 99)
)
def test_bernoulli_agrees_with_torch(lead, shape, seed):
    dist = Bernoulli(shape)
    g = generator(seed)
    p, q = 3 * torch.randn(2, *lead, *shape, generator=g)
    act = dist.sample(p, dist.noise(lead, g))
    ref_p, ref_q = (td.Independent(td.Bernoulli(logits=x), len(shape)) for x in (p, q))
    assert act.shape == (*lead, *shape) and act.dtype == torch.int64
    close = dict(rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dist.log_prob(p, act), ref_p.log_prob(act.float()), **close)
    torch.testing.assert_close(dist.log_prob(p, act.to(torch.int8)), dist.log_prob(p, act))
    torch.testing.assert_close(dist.entropy(p), ref_p.entropy(), **close)
    torch.testing.assert_close(dist.kl(p, q), td.kl_divergence(ref_p, ref_q), **close)
    assert torch.equal(dist.mode(p), (ref_p.mean > 0.5).long())


def fisher_by_hessian(dist, params, tangent):
    "The Hessian of q -> KL(p || q) at q = p, in float64, times the tangent: the definition of the Fisher product."
    flat, spec = torch.utils._pytree.tree_flatten(params)
    sizes = [x.numel() for x in flat]

    def kl(x):
        q = [part.view_as(leaf) for part, leaf in zip(x.split(sizes), flat)]
        return dist.kl(params, torch.utils._pytree.tree_unflatten(q, spec))

    hessian = torch.autograd.functional.hessian(kl, torch.cat([x.reshape(-1) for x in flat]))
    return hessian @ torch.cat([x.reshape(-1) for x in torch.utils._pytree.tree_leaves(tangent)])


def double(tree):
    return nested.map(lambda x: x.double(), tree)


@pytest.mark.parametrize(
    "dist, params",
    [
        (Categorical(4), torch.tensor([0.3, -1, 2, 0])),
        (MultiCategorical((2, 4, 1)), torch.tensor([0.3, -1, 2, 0, 0.5, 0.1, 7])),
        (MultiCategorical((2, 2), shape=(1, 2)), torch.tensor([0.3, -1, 2, 0])),
        (Bernoulli((2, 2)), torch.tensor([[0.3, -1], [2, 0]])),
        (Gaussian((3,)), gaussian_params([], (3,), 0)),
        (Gaussian(), gaussian_params([], (), 1)),
        (
            Joint((Categorical(2), [Gaussian((2, 2))])),
            (torch.tensor([1.0, -1]), [gaussian_params([], (2, 2), 2)]),
        ),
        (
            Joint({"a": Categorical(3, 5), "b": Gaussian((1,))}),
            {"a": torch.tensor([3.0, 0, 1]), "b": gaussian_params([], (1,), 4)},
        ),
    ],
)
def test_fisher_is_the_hessian_of_kl(dist, params):
    params = double(params)
    tangent = nested.map(
        lambda x: torch.randn(x.shape, generator=generator(x.numel()), dtype=x.dtype), params
    )
    product = torch.cat(
        [x.reshape(-1) for x in torch.utils._pytree.tree_leaves(dist.fisher(params, tangent))]
    )
    torch.testing.assert_close(product, fisher_by_hessian(dist, params, tangent))


def test_categorical_frequencies():
    p = torch.tensor([0.05, 0.15, 0.3, 0.5])
    n = 50_000
    dist = Categorical(4)
    acts = dist.sample(p.log(), dist.noise([n], generator(0)))
    counts = torch.bincount(acts, minlength=4)
    chi_square = ((counts - n * p) ** 2 / (n * p)).sum()
    assert chi_square < 16.27  # 99.9 % quantile, 3 degrees of freedom


def test_frequencies_of_several():
    n = 50_000
    p = torch.tensor([0.05, 0.3, 0.5, 0.9])
    acts = Bernoulli((4,)).sample(p.logit(), Bernoulli((4,)).noise([n], generator(0)))
    assert (
        ((acts.sum(0) - n * p) ** 2 / (n * p * (1 - p))) < 10.83
    ).all()  # 99.9 % quantile, 1 degree of freedom
    dist = MultiCategorical((2, 3))
    p = torch.tensor([[0.4], [0.6]]) * torch.tensor([0.2, 0.3, 0.5])
    acts = dist.sample(torch.tensor([0.4, 0.6, 0.2, 0.3, 0.5]).log(), dist.noise([n], generator(0)))
    counts = (3 * acts[:, 0] + acts[:, 1]).bincount(minlength=6).view(2, 3)
    assert ((counts - n * p) ** 2 / (n * p)).sum() < 20.52  # of all pairs: 5 degrees of freedom


def test_extreme_switches_are_finite():
    x = torch.tensor([-200.0, 0.0, 200.0], requires_grad=True)
    dist = Bernoulli((3,))
    for value in (
        dist.entropy(x),
        dist.kl(x, x.detach().flip(0)),
        dist.log_prob(x, torch.tensor([0, 1, 1])),
    ):
        assert torch.isfinite(value) and torch.isfinite(torch.autograd.grad(value, x)[0]).all()
    assert torch.isfinite(Bernoulli((10_000,)).noise([100], generator(0))).all()


def test_numbers_of_unequal_lengths_have_finite_gradients():
    dist = MultiCategorical((1, 3, 2))
    x = torch.randn(4, 6, generator=generator(0), requires_grad=True)
    for value in (
        dist.entropy(x),
        dist.kl(x.detach(), x),
        dist.kl(x, 2 * x.detach()),
        dist.log_prob(x, dist.mode(x)),
    ):
        assert torch.isfinite(torch.autograd.grad(value.sum(), x)[0]).all()


def test_gaussian_moments():
    dist = Gaussian((2,))
    params = GaussianParams(torch.tensor([1.0, -5.0]), torch.tensor([0.0, math.log(3.0)]))
    acts = dist.sample(params, dist.noise([50_000], generator(0)))
    torch.testing.assert_close(acts.mean(0), params.mean, atol=0.05, rtol=0)
    torch.testing.assert_close(acts.std(0), params.log_std.exp(), rtol=0.02, atol=0)


def test_gumbel_noise_is_finite_and_has_the_right_mean():
    noise = Categorical(100).noise([1000], generator(0))
    assert torch.isfinite(noise).all()
    assert abs(noise.mean() - 0.5772) < 0.02  # Euler's constant


def test_masked_logits_have_finite_gradients_everywhere():
    dist = Categorical(3)
    logits = torch.tensor(
        [[0.0, -torch.inf, 1.0], [-torch.inf, 2.0, -torch.inf]], requires_grad=True
    )
    for value in (
        dist.entropy(logits),
        dist.kl(logits.detach(), logits),
        dist.kl(logits, logits.detach()),
        dist.log_prob(logits, torch.tensor([2, 1])),
    ):
        assert torch.isfinite(value).all()
        assert torch.isfinite(torch.autograd.grad(value.sum(), logits)[0]).all()
    assert torch.isfinite(dist.fisher(logits.detach(), torch.ones(2, 3))).all()
    impossible = dist.kl(
        torch.zeros(3), logits[0].detach()
    )  # p > 0 where q = 0: infinite, or very large
    assert impossible > 1e30


@pytest.mark.parametrize(
    "dist",
    [
        Categorical(3),
        Gaussian((2,)),
        Gaussian(),
        MultiCategorical((2, 3)),
        Bernoulli((2,)),
        Joint({"a": Categorical(2), "b": (Gaussian(),)}),
    ],
)
def test_noise_depends_on_the_generator_only(dist):
    state = torch.get_rng_state()
    first, second, other = (nested.leaves(dist.noise([6, 5], generator(s))) for s in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert not any(torch.equal(a, b) for a, b in zip(first, other))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(x.shape[:2] == (6, 5) for x in first)


def test_joint_of_parts_is_the_sum():
    dist = Joint([Categorical(3), {"x": Gaussian((2,)), "y": Categorical(2, start=1)}])
    g = generator(0)
    params = [
        torch.randn(4, 3, generator=g),
        {"x": gaussian_params([4], (2,), 0), "y": torch.randn(4, 2, generator=g)},
    ]
    other = [
        torch.randn(4, 3, generator=g),
        {"x": gaussian_params([4], (2,), 1), "y": torch.randn(4, 2, generator=g)},
    ]
    act = dist.sample(params, dist.noise([4], g))
    parts = [
        (Categorical(3), lambda t: t[0]),
        (Gaussian((2,)), lambda t: t[1]["x"]),
        (Categorical(2, 1), lambda t: t[1]["y"]),
    ]
    torch.testing.assert_close(
        dist.log_prob(params, act), sum(d.log_prob(get(params), get(act)) for d, get in parts)
    )
    torch.testing.assert_close(
        dist.entropy(params), sum(d.entropy(get(params)) for d, get in parts)
    )
    torch.testing.assert_close(
        dist.kl(params, other), sum(d.kl(get(params), get(other)) for d, get in parts)
    )
