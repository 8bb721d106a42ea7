"""Distributions against torch.distributions, autograd and counting."""

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

leads = st.lists(st.integers(1, 3), max_size=3)


def generator(seed):
    return torch.Generator().manual_seed(seed)


@st.composite
def several(draw):
    "A `MultiCategorical` with actions of one or two dimensions."
    n = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    start = draw(st.just(()) | st.lists(st.integers(-3, 3), min_size=len(n), max_size=len(n)))
    is_matrix = len(n) % 2 == 0 and draw(st.booleans())
    return MultiCategorical(n, start, (2, len(n) // 2) if is_matrix else None)


shapes = st.lists(st.integers(1, 3), max_size=2).map(tuple)
dists = (
    st.builds(Categorical, st.integers(1, 5), st.integers(-3, 3))
    | several()
    | st.builds(Gaussian, shapes)
    | st.builds(Bernoulli, shapes)
)


def random_params(dist, lead, g):
    "Parameters `[*lead, ...]` of a distribution."
    if isinstance(dist, Gaussian):
        return GaussianParams(*torch.randn(2, *lead, *dist.shape, generator=g))
    if isinstance(dist, Bernoulli):
        return 3 * torch.randn((*lead, *dist.shape), generator=g)
    n = [dist.n] if isinstance(dist, Categorical) else dist.n
    return torch.randn(*lead, sum(n), generator=g)


def by_torch(dist, params):
    "The independent parts of a distribution as torch has them, and what makes their values of an action."
    if isinstance(dist, Gaussian):
        normal = td.Normal(params.mean, params.log_std.exp())
        return [td.Independent(normal, len(dist.shape))], lambda act: [act]
    if isinstance(dist, Bernoulli):
        independent = td.Independent(td.Bernoulli(logits=params), len(dist.shape))
        return [independent], lambda act: [act.float()]
    if isinstance(dist, Categorical):
        return [td.Categorical(logits=params)], lambda act: [act - dist.start]

    start = dist.start or (0,) * len(dist.n)
    parts = [td.Categorical(logits=x) for x in params.split(dist.n, -1)]

    def columns(act):
        numbers = act.reshape(*act.shape[: act.ndim - len(dist.shape)], -1).unbind(-1)
        return [a - s for a, s in zip(numbers, start)]

    return parts, columns


def mode_by_hand(dist, params):
    "The most likely action."
    if isinstance(dist, Gaussian):
        return params.mean
    if isinstance(dist, Bernoulli):
        return (params > 0).long()
    parts, _ = by_torch(dist, params)
    start = (dist.start,) if isinstance(dist, Categorical) else dist.start or (0,) * len(dist.n)
    best = torch.stack([x.logits.argmax(-1) + s for x, s in zip(parts, start)], -1)
    return best[..., 0] if isinstance(dist, Categorical) else best.unflatten(-1, dist.shape)


@settings(deadline=None, max_examples=100)
@given(dist=dists, lead=leads, seed=st.integers(0, 99))
def test_distributions_agree_with_those_of_torch(dist, lead, seed):
    "Actions are in their range, whatever the dtype in which they come back."
    g = generator(seed)
    p, q = (random_params(dist, lead, g) for _ in range(2))
    noise = dist.noise(lead, g)
    act = dist.sample(p, noise)
    parts, split = by_torch(dist, p)
    others, _ = by_torch(dist, q)
    close = dict(rtol=1e-4, atol=1e-4)
    for x, part in zip(split(act), parts):
        assert part.support.check(x).all()
    logp = sum(part.log_prob(x) for part, x in zip(parts, split(act)))
    torch.testing.assert_close(dist.log_prob(p, act), logp, **close)
    torch.testing.assert_close(dist.entropy(p), sum(part.entropy() for part in parts), **close)
    kl = sum(map(td.kl_divergence, parts, others))
    torch.testing.assert_close(dist.kl(p, q), kl, **close)
    assert torch.equal(dist.mode(p), mode_by_hand(dist, p))

    if isinstance(dist, Gaussian):
        torch.testing.assert_close(act, p.mean + p.log_std.exp() * noise)
    else:
        assert act.dtype == torch.int64
        torch.testing.assert_close(dist.log_prob(p, act.to(torch.int8)), dist.log_prob(p, act))


def test_actions_of_one_byte():
    params = torch.randn(200, generator=generator(0))
    assert (
        Categorical(200, -100).log_prob(params, torch.tensor(99, dtype=torch.int8))
        == params.log_softmax(-1)[199]
    )


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
        (Gaussian((3,)), random_params(Gaussian((3,)), [], generator(0))),
        (Gaussian(), random_params(Gaussian(), [], generator(1))),
        (
            Joint((Categorical(2), [Gaussian((2, 2))])),
            (torch.tensor([1.0, -1]), [random_params(Gaussian((2, 2)), [], generator(2))]),
        ),
        (
            Joint({"a": Categorical(3, 5), "b": Gaussian((1,))}),
            {"a": torch.tensor([3.0, 0, 1]), "b": random_params(Gaussian((1,)), [], generator(4))},
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
