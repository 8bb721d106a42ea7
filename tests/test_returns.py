"Returns and advantages against slow oracles written from the formulas, one element at a time, and against identities."

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.data.returns import (
    backward_recursion,
    discounted_returns,
    gae,
    n_step_returns,
    running_returns,
    td_errors,
    vtrace,
)

GAMMA = 0.9


def make_trace(seed, shape, dtype=torch.float64, p_end=0.25):
    "Random rows with ends of both kinds. Values follow one another except where an episode was cut."
    gen = torch.Generator().manual_seed(seed)

    def randn():
        return torch.randn(shape, generator=gen, dtype=dtype)

    def chance(p):
        return torch.rand(shape, generator=gen) < p

    rew = randn()
    v_t = randn()
    last = randn()
    rho = randn().exp()
    cut = chance(p_end)
    truncated = chance(0.5)
    v_tp1 = torch.where(cut, last, torch.cat([v_t[1:], last[-1:]]))
    discount = torch.where(cut & ~truncated, 0.0, GAMMA).to(dtype)
    return rew, v_t, v_tp1, discount, rho, cut


def elementwise(oracle, *args):
    "Apply an oracle on lists of length T to each trailing element of [T, ...] tensors, in double precision."
    T = len(args[0])
    shape = args[0].shape
    columns = zip(*(x.reshape(T, -1).t().tolist() for x in args))
    return (
        torch.tensor([oracle(*column) for column in columns], dtype=torch.float64)
        .t()
        .reshape(shape)
    )


def end_of_episode(cut, t):
    "Index of the last row of the episode, or of the trace, that row t belongs to."
    while t < len(cut) - 1 and not cut[t]:
        t += 1
    return t


def slow_returns(n):
    "Sum of discounted, weighted rewards over at most n rows, plus the discounted value of the state reached there."

    def oracle(rew, v_tp1, discount, rho, cut):
        out = []
        for t in range(len(rew)):
            total, factor = 0.0, 1.0
            last = min(end_of_episode(cut, t), t + n - 1)
            for k in range(t, last + 1):
                factor *= rho[k]
                total += factor * rew[k]
                factor *= discount[k]
            out.append(total + factor * v_tp1[last])
        return out

    return oracle


def slow_gae(lam):
    "The sum of equation 16 as it stands: discounted TD errors to the end of the episode."

    def oracle(rew, v_t, v_tp1, discount, cut):
        out = []
        for t in range(len(rew)):
            total, factor = 0.0, 1.0
            for k in range(t, end_of_episode(cut, t) + 1):
                total += factor * (rew[k] + discount[k] * v_tp1[k] - v_t[k])
                factor *= lam * discount[k]
            out.append(total)
        return out

    return oracle


def slow_vtrace(lam, c_clip, rho_clip):
    "Equation 1 of the V-trace paper, a sum of products of clipped weights; from these targets the advantages."

    def oracle(rew, v_t, v_tp1, discount, rho, cut):
        vs = []
        adv = []
        for t in range(len(rew)):
            total = v_t[t]
            factor = 1.0
            for k in range(t, end_of_episode(cut, t) + 1):
                total += factor * min(rho_clip, rho[k]) * (rew[k] + discount[k] * v_tp1[k] - v_t[k])
                factor *= discount[k] * lam * min(c_clip, rho[k])
            vs.append(total)
        for t in range(len(rew)):
            inside = t + 1 < len(rew) and not cut[t]
            target = (1 - lam) * v_tp1[t] + lam * vs[t + 1] if inside else v_tp1[t]
            adv.append(min(rho_clip, rho[t]) * (rew[t] + discount[t] * target - v_t[t]))
        return list(zip(vs, adv))

    return oracle


shapes = st.tuples(st.integers(1, 40)).flatmap(
    lambda t: st.lists(st.integers(1, 3), max_size=2).map(lambda rest: (*t, *rest))
)
traces = dict(
    seed=st.integers(0, 2**32 - 1),
    shape=shapes,
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
quick = settings(deadline=None, max_examples=25)


def assert_like(out, expected, ref):
    assert out.dtype == ref.dtype and out.shape == ref.shape
    torch.testing.assert_close(
        out.double(), expected, rtol=1e-5, atol=1e-5 if ref.dtype == torch.float32 else 1e-12
    )


@quick
@given(**traces, weighted=st.booleans())
def test_discounted_returns_against_sum_of_rewards(seed, shape, dtype, weighted):
    rew, _, v_tp1, discount, rho, cut = make_trace(seed, shape, dtype)
    rho = rho.clamp(max=1.5) if weighted else torch.ones_like(rho)
    out = discounted_returns(rew, discount, v_tp1[-1], cut, v_tp1, rho if weighted else None)
    assert_like(out, elementwise(slow_returns(len(rew)), rew, v_tp1, discount, rho, cut), rew)


@quick
@given(**traces, n=st.integers(1, 50))
def test_n_step_returns_against_sum_of_rewards(seed, shape, dtype, n):
    rew, _, v_tp1, discount, rho, cut = make_trace(seed, shape, dtype)
    out = n_step_returns(rew, v_tp1, discount, n, cut)
    assert_like(
        out, elementwise(slow_returns(n), rew, v_tp1, discount, torch.ones_like(rho), cut), rew
    )


@quick
@given(**traces, lam=st.floats(0, 1))
def test_gae_against_sum_of_errors(seed, shape, dtype, lam):
    rew, v_t, v_tp1, discount, _, cut = make_trace(seed, shape, dtype)
    assert_like(
        gae(rew, v_t, v_tp1, discount, lam, cut),
        elementwise(slow_gae(lam), rew, v_t, v_tp1, discount, cut),
        rew,
    )


@quick
@given(
    **traces,
    lam=st.floats(0, 1),
    clips=st.sampled_from([(1.0, 1.0), (0.5, 2.0), (1.0, float("inf")), (1.2, 1.2)]),
)
def test_vtrace_against_sum_of_errors(seed, shape, dtype, lam, clips):
    args = make_trace(seed, shape, dtype)
    *most, cut = args
    out = vtrace(*most, lam, *clips, cut)
    T = shape[0]
    columns = zip(*(x.reshape(T, -1).t().tolist() for x in args))
    slow = torch.tensor(
        [slow_vtrace(lam, *clips)(*column) for column in columns], dtype=torch.float64
    )
    assert_like(out.vs, slow[..., 0].t().reshape(shape), args[0])
    assert_like(out.adv, slow[..., 1].t().reshape(shape), args[0])


@pytest.mark.parametrize("T", [128, 2048])
def test_long_traces_in_single_precision(T):
    rew, v_t, v_tp1, discount, _, cut = make_trace(0, (T, 4), p_end=0.01)
    expected = elementwise(slow_gae(0.95), rew, v_t, v_tp1, discount, cut)
    out = gae(rew.float(), v_t.float(), v_tp1.float(), discount.float(), 0.95, cut)
    assert (out - expected).norm() < 1e-6 * expected.norm()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_gae_at_the_ends_of_lambda(seed):
    rew, v_t, v_tp1, discount, _, cut = make_trace(seed, (30, 2))
    torch.testing.assert_close(
        gae(rew, v_t, v_tp1, discount, 0.0, cut), td_errors(rew, v_t, v_tp1, discount)
    )
    torch.testing.assert_close(
        gae(rew, v_t, v_tp1, discount, 1.0, cut) + v_t,
        discounted_returns(rew, discount, v_tp1[-1], cut, v_tp1),
    )


@pytest.mark.parametrize("seed", range(5))
def test_many_steps_are_the_whole_return(seed):
    rew, _, v_tp1, discount, _, cut = make_trace(seed, (17, 2))
    whole = discounted_returns(rew, discount, v_tp1[-1], cut, v_tp1)
    for n in (17, 18, 1000):
        torch.testing.assert_close(n_step_returns(rew, v_tp1, discount, n, cut), whole)
    torch.testing.assert_close(
        n_step_returns(rew, v_tp1, discount, 16)[1:],
        discounted_returns(rew, discount, v_tp1[-1])[1:],
    )


@pytest.mark.parametrize("seed", range(5))
def test_vtrace_on_policy_is_the_lambda_return(seed):
    rew, v_t, v_tp1, discount, rho, cut = make_trace(seed, (30, 2))
    out = vtrace(rew, v_t, v_tp1, discount, torch.ones_like(rho), cut=cut)
    torch.testing.assert_close(out.vs, discounted_returns(rew, discount, v_tp1[-1], cut, v_tp1))
    for lam in (0.0, 0.3, 1.0):
        out = vtrace(rew, v_t, v_tp1, discount, torch.ones_like(rho), lam, cut=cut)
        adv = gae(rew, v_t, v_tp1, discount, lam, cut)
        torch.testing.assert_close(out.adv, adv)
        torch.testing.assert_close(out.vs, adv + v_t)


def test_vtrace_clips():
    "Weights above the thresholds count as the thresholds, and the two thresholds do different things."
    rew, v_t, v_tp1, discount, rho, cut = make_trace(1, (30, 2))
    args = rew, v_t, v_tp1, discount
    above = vtrace(*args, 1 + rho, cut=cut), vtrace(*args, torch.ones_like(rho), cut=cut)
    for x, y in zip(*above):
        torch.testing.assert_close(x, y)
    # without any carrying back, the targets are one-step and rho_clip alone decides
    out = vtrace(*args, rho, c_clip=0.0, rho_clip=2.0, cut=cut)
    torch.testing.assert_close(out.vs, v_t + rho.clamp(max=2.0) * td_errors(*args))
    # adv is the error of the targets one row later, recomputed from the targets themselves
    out = vtrace(*args, rho, rho_clip=2.0, cut=cut)
    reached = torch.where(cut[:-1], v_tp1[:-1], out.vs[1:])
    torch.testing.assert_close(
        out.adv[:-1],
        rho[:-1].clamp(max=2.0) * (rew + discount * torch.cat([reached, v_tp1[-1:]]) - v_t)[:-1],
    )


estimators = {
    "returns": lambda rew, v_t, v_tp1, discount, rho, cut: discounted_returns(
        rew, discount, v_tp1[-1], cut, v_tp1, rho
    ),
    "n_step": lambda rew, v_t, v_tp1, discount, rho, cut: n_step_returns(
        rew, v_tp1, discount, 3, cut
    ),
    "gae": lambda rew, v_t, v_tp1, discount, rho, cut: gae(rew, v_t, v_tp1, discount, 0.7, cut),
    "vs": lambda rew, v_t, v_tp1, discount, rho, cut: (
        vtrace(rew, v_t, v_tp1, discount, rho, 0.7, cut=cut).vs
    ),
    "adv": lambda rew, v_t, v_tp1, discount, rho, cut: (
        vtrace(rew, v_t, v_tp1, discount, rho, 0.7, cut=cut).adv
    ),
}


@pytest.mark.parametrize("name", estimators)
def test_episodes_in_one_trace_are_the_episodes_apart(name):
    "And to the last bit: what precedes and what follows an episode leaves no trace in it."
    args = make_trace(3, (29,), torch.float32, p_end=0.2)
    fn = estimators[name]
    ends = args[-1].nonzero().flatten().tolist()
    bounds = [0, *(t + 1 for t in ends if t < 28), 29]
    assert len(bounds) > 4
    apart = torch.cat([fn(*(x[i:j] for x in args)) for i, j in zip(bounds, bounds[1:])])
    assert torch.equal(fn(*args), apart)


@pytest.mark.parametrize("name", estimators)
def test_trailing_dims_are_independent(name):
    args = make_trace(4, (20, 3, 2))
    fn = estimators[name]
    out = fn(*args)
    for i in range(3):
        for j in range(2):
            torch.testing.assert_close(out[:, i, j], fn(*(x[:, i, j] for x in args)))
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in args]
    torch.testing.assert_close(fn(*strided), out)


@pytest.mark.parametrize("name", estimators)
def test_arguments_are_left_alone(name):
    args = make_trace(5, (1, 2)), make_trace(5, (20, 2))
    for rows in args:
        before = [x.clone() for x in rows]
        estimators[name](*rows).zero_()
        for x, y in zip(rows, before):
            assert torch.equal(x, y)


@pytest.mark.parametrize("end", [0, 7, 19])
def test_truncation_is_worth_the_discounted_final_value(end):
    rew, v_t, v_tp1, _, _, _ = make_trace(6, (20,))
    cut = torch.zeros(20, dtype=torch.bool)
    cut[end] = True
    truncated = torch.full_like(rew, GAMMA)
    terminated = truncated.masked_fill(cut, 0.0)
    due = GAMMA * v_tp1[end]
    rows = torch.arange(20, dtype=rew.dtype)
    for decay, fn in ((GAMMA, estimators["returns"]), (GAMMA * 0.7, estimators["gae"])):
        diff = fn(rew, v_t, v_tp1, truncated, torch.ones_like(rew), cut) - fn(
            rew, v_t, v_tp1, terminated, torch.ones_like(rew), cut
        )
        expected = torch.where(rows <= end, due * decay ** (end - rows).clamp(min=0), 0.0)
        torch.testing.assert_close(diff, expected)


def test_termination_hides_the_value_of_the_terminal_state():
    rew, v_t, v_tp1, discount, rho, cut = make_trace(7, (20, 2))
    other = torch.where(discount == 0, 1e6, v_tp1)
    for fn in estimators.values():
        torch.testing.assert_close(
            fn(rew, v_t, v_tp1, discount, rho, cut), fn(rew, v_t, other, discount, rho, cut)
        )


def test_swapped_and_unmasked_errors_are_told_apart():
    "A known mistake, `r + gamma * v * done - v_next` for the TD error, does not pass what ours passes."

    def wrong_errors(rew, v_t, v_tp1, discount):
        return rew + GAMMA * v_t * (discount == 0) - v_tp1

    rew, v_t, v_tp1, discount, _, _ = make_trace(8, (30,))
    no_step = torch.zeros(30, dtype=torch.bool)
    oracle = elementwise(slow_gae(0.0), rew, v_t, v_tp1, discount, no_step)
    torch.testing.assert_close(td_errors(rew, v_t, v_tp1, discount), oracle)
    assert (wrong_errors(rew, v_t, v_tp1, discount) - oracle).abs().max() > 0.5
    # a perfect value function has no errors: rewards of 1 for ever are worth 1 / (1 - gamma)
    v = torch.full((30,), 1 / (1 - GAMMA))
    one = torch.ones(30)
    torch.testing.assert_close(td_errors(one, v, v, GAMMA * one), torch.zeros(30))
    assert wrong_errors(one, v, v, GAMMA * one).abs().min() > 0.5


@pytest.mark.parametrize("ends", [[], [63], [19, 39, 59]])
def test_products_of_weights_that_overflow_do_not_hide_a_finite_return(ends):
    rho = torch.full((64, 2), 20.0)
    cut = torch.zeros(64, 2, dtype=torch.bool)
    rew = torch.zeros(64, 2)
    cut[ends], rew[[0, *(t + 1 for t in ends if t < 63)]] = True, 1.0
    out = discounted_returns(rew, GAMMA, 0.0, cut, None, rho)
    torch.testing.assert_close(out, 20 * rew)  # what comes later in an episode is worth nothing
    rew[5] = 3.0
    one = torch.zeros(64, 2, dtype=torch.float64)
    for t in reversed(range(64)):
        one[t] = 20 * (rew[t] + (GAMMA * one[t + 1] if t < 63 and not cut[t, 0] else 0))
    torch.testing.assert_close(
        discounted_returns(rew, GAMMA, 0.0, cut, None, rho), one.float(), rtol=1e-4, atol=0
    )


def test_gradients_are_those_of_the_loop():
    gen = torch.Generator().manual_seed(0)
    a = torch.rand(9, 2, generator=gen, dtype=torch.float64, requires_grad=True)
    b = torch.randn(9, 2, generator=gen, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(backward_recursion, (a, b))


def test_unit_coefficients_are_a_sum_from_the_end():
    b = torch.arange(1.0, 12.0)
    assert torch.equal(backward_recursion(torch.ones(11), b), b.flip(0).cumsum(0).flip(0))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(rew=torch.zeros(5, 2, dtype=torch.int64)), "rew: not a time-major tensor."),
        (dict(rew=torch.tensor(1.0)), "rew: not a time-major tensor."),
        (
            dict(v_t=torch.zeros(5, 2).numpy()),
            "v_t: not a time-major tensor. .* got ndarray float32",
        ),
        (
            dict(v_t=torch.zeros(6, 2)),
            r"v_t: does not match rew. Expected tensor float32 \[5, 2\] or its first dimensions, got tensor float32 \[6, 2\]",
        ),
        (dict(v_tp1=torch.zeros(2)), r"v_tp1: does not match rew. .* got tensor float32 \[2\]"),
        (
            dict(v_tp1=torch.zeros(1, 2)),
            r"v_tp1: does not match rew. .* got tensor float32 \[1, 2\]",
        ),
        (
            dict(v_tp1=torch.zeros(5, 2, 1)),
            r"v_tp1: does not match rew. .* got tensor float32 \[5, 2, 1\]",
        ),
        (dict(v_tp1=True), "v_tp1: not a time-major tensor. .* got bool True"),
        (
            dict(discount=torch.zeros(5, 2, dtype=torch.float64)),
            "discount: does not match rew. .* got tensor float64",
        ),
        (
            dict(discount=[0.9]),
            r"discount: not a time-major tensor. Expected a number, or tensor float32 \[5, 2\], like rew, got list \[0.9\]",
        ),
        (
            dict(discount=torch.zeros(3)),
            r"discount: does not match rew. Expected tensor float32 \[5, 2\] or its first or last dimensions, got tensor float32 \[3\]",
        ),
        (
            dict(cut=torch.zeros(5, 2)),
            r"cut: not a mask of the episode ends. Expected tensor bool \[5, 2\]",
        ),
        (dict(cut=torch.zeros(2, dtype=torch.bool)), "cut: not a mask"),
        (
            dict(cut=torch.zeros(5, 2, dtype=torch.bool).numpy()),
            "cut: not a mask of the episode ends. .* got ndarray bool",
        ),
        (dict(lam=-0.1), r"lam: out of range. Expected a number in \[0, 1\], got -0.1"),
        (dict(lam=float("nan")), "lam: out of range"),
    ],
)
def test_bad_arguments_are_named(change, message):
    x = torch.zeros(5, 2)
    args = dict(rew=x, v_t=x, v_tp1=x, discount=x, lam=0.5, cut=None)
    with pytest.raises(DataError, match=message):
        gae(**{**args, **change})


def test_bad_arguments_of_the_others_are_named():
    x = torch.zeros(5, 2)
    with pytest.raises(DataError, match="rew: not a time-major tensor"):
        discounted_returns(x[:0], x[:0])
    with pytest.raises(DataError, match=r"bootstrap: wrong shape. Expected \[2\] or a number"):
        discounted_returns(x, x, torch.zeros(5, 2))
    with pytest.raises(DataError, match="rho: does not match rew"):
        discounted_returns(x, x, rho=x[0])
    with pytest.raises(
        DataError,
        match=r"before: wrong shape. Expected \[2\] or a number, got tensor float32 \[3\]",
    ):
        running_returns(x, x, torch.zeros(3))
    with pytest.raises(DataError, match="a: does not match b"):
        backward_recursion(x[1:], x)
    with pytest.raises(DataError, match="n: too few steps. Expected n >= 1, got 0"):
        n_step_returns(x, x, x, 0)
    with pytest.raises(DataError, match="rho: does not match rew"):
        vtrace(x, x, x, x, x[1:])
    with pytest.raises(DataError, match="c_clip: out of range"):
        vtrace(x, x, x, x, x, c_clip=2.0, rho_clip=1.0)


# --- numbers, arrays and broadcasting, against the same functions of full tensors, element by element


def spread(x, shape, right=False):
    "`x`, a number or a tensor, at each index of `shape`: its dimensions are the first ones of the index, or the last ones."
    x = torch.as_tensor(x, dtype=torch.float64 if isinstance(x, float) else None)
    out = torch.empty(shape, dtype=x.dtype)
    for flat in range(out.numel()):
        index = np.unravel_index(flat, shape)
        part = index[len(index) - x.dim() :] if right else index[: x.dim()]
        out[tuple(int(i) for i in index)] = x[tuple(int(i) % n for i, n in zip(part, x.shape))]
    return out


@st.composite
def small_arguments(draw):
    "Rewards `[T, ...]`, and the other arguments in any form that broadcasts to them; what they stand for; whether as arrays."
    shape = (draw(st.integers(1, 9)), *draw(st.lists(st.integers(1, 3), max_size=2)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    names = "rew", "v_t", "v_tp1", "discount", "rho", "cut"
    small = dict(zip(names, make_trace(draw(st.integers(0, 2**32 - 1)), shape, dtype)))
    full = {"rew": small["rew"]}
    discount_right = draw(st.booleans())
    for name in names[1:]:
        x = small[name]
        right = name == "discount" and discount_right
        if name != "cut" and draw(st.integers(0, 3)) == 0:
            small[name] = float(x.flatten()[0])
        else:
            n = draw(st.integers(1, len(shape)))
            if right:
                small[name] = x[(0,) * (len(shape) - n)]
            else:
                small[name] = x[(...,) + (0,) * (len(shape) - n)]
                if n > 1 and draw(st.booleans()):
                    small[name] = small[name][..., :1]
        full[name] = spread(small[name], shape, right).to(x.dtype)
    return small, full, draw(st.booleans())


def fits_in_two_ways(x, shape):
    if isinstance(x, float):
        return False
    ones = [1] * (len(shape) - x.dim())
    ways = [*x.shape, *ones], [*ones, *x.shape]
    return ways[0] != ways[1] and all(all(n in (1, m) for n, m in zip(way, shape)) for way in ways)


def as_arrays(args):
    return {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in args.items()}


broadcasting = {
    "recursion": (lambda rew, discount, **_: backward_recursion(discount, rew)),
    "returns": (
        lambda rew, discount, v_tp1, rho, cut, **_: discounted_returns(
            rew, discount, 2.0, cut, v_tp1, rho
        )
    ),
    "n_step": (lambda rew, discount, v_tp1, cut, **_: n_step_returns(rew, v_tp1, discount, 3, cut)),
    "td": (lambda rew, discount, v_t, v_tp1, **_: td_errors(rew, v_t, v_tp1, discount)),
    "gae": (lambda rew, discount, v_t, v_tp1, cut, **_: gae(rew, v_t, v_tp1, discount, 0.7, cut)),
    "vs": (lambda **args: vtrace(lam=0.7, **args).vs),
    "adv": (lambda **args: vtrace(lam=0.7, **args).adv),
    "running": (lambda rew, discount, **_: running_returns(rew, discount, 2.0)),
}


@settings(deadline=None, max_examples=150)
@given(arguments=small_arguments(), name=st.sampled_from(sorted(broadcasting)))
def test_smaller_arguments_stand_for_full_ones(arguments, name):
    "The same bits as with every argument written out, and the kind, dtype and shape of the rewards."
    (small, full, numpy) = arguments
    fn = broadcasting[name]
    given_ = as_arrays(small) if numpy else small
    if fits_in_two_ways(small["discount"], full["rew"].shape):
        with pytest.raises(DataError, match="(discount|a): fits (rew|b) in two ways"):
            fn(**given_)
        return
    out = fn(**given_)
    expected = fn(**full)
    assert type(out) is (np.ndarray if numpy else torch.Tensor)
    out = torch.from_numpy(out) if numpy else out
    assert out.dtype == expected.dtype == full["rew"].dtype and torch.equal(out, expected)


@settings(deadline=None, max_examples=60)
@given(arguments=small_arguments(), lam=st.floats(0, 1))
def test_smaller_arguments_against_the_formulas(arguments, lam):
    small, full, numpy = arguments
    if fits_in_two_ways(small["discount"], full["rew"].shape):
        return
    x = as_arrays(small) if numpy else small
    columns = [full[name] for name in ("rew", "v_t", "v_tp1", "discount", "cut")]
    assert_like(
        torch.as_tensor(gae(x["rew"], x["v_t"], x["v_tp1"], x["discount"], lam, x["cut"])),
        elementwise(slow_gae(lam), *columns),
        full["rew"],
    )
    rho = torch.ones_like(full["rew"])
    assert_like(
        torch.as_tensor(n_step_returns(x["rew"], x["v_tp1"], x["discount"], 2, x["cut"])),
        elementwise(
            slow_returns(2), full["rew"], full["v_tp1"], full["discount"], rho, full["cut"]
        ),
        full["rew"],
    )


def test_each_of_several_rewards_has_a_discount_of_its_own():
    "Rewards [T, B, K]; ends, values and weights [T, B]; a discount for each of the K."
    rew, v_t, v_tp1, _, rho, cut = (
        x[..., 0] if i else x for i, x in enumerate(make_trace(2, (7, 2, 3)))
    )
    own = torch.tensor([0.9, 0.5, 0.0], dtype=torch.float64)
    out = vtrace(rew, v_t, v_tp1, own, rho, 0.8, cut=cut)
    last = discounted_returns(rew, own, torch.stack([v_tp1[-1]] * 3, -1), cut)
    for k in range(3):
        one = vtrace(rew[..., k], v_t, v_tp1, float(own[k]), rho, 0.8, cut=cut)
        assert torch.equal(out.vs[..., k], one.vs) and torch.equal(out.adv[..., k], one.adv)
        assert torch.equal(
            last[..., k], discounted_returns(rew[..., k], float(own[k]), v_tp1[-1], cut)
        )
    assert torch.equal(last, discounted_returns(rew, own, v_tp1[-1], cut))


def test_running_returns_against_the_loop():
    gen = torch.Generator().manual_seed(0)
    rew = torch.randn(9, 2, 3, generator=gen)
    discount = torch.rand(9, 2, generator=gen)
    before = torch.randn(2, generator=gen)
    expected = []
    x = before[:, None]
    for t in range(9):
        expected.append(x := rew[t] + discount[t, :, None] * x)
    torch.testing.assert_close(running_returns(rew, discount, before), torch.stack(expected))
    out = running_returns(rew.numpy(), discount.numpy(), before.numpy())
    np.testing.assert_allclose(out, torch.stack(expected).numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", broadcasting)
def test_gradients_of_smaller_arguments_are_the_sums_of_those_of_full_ones(name):
    rew, v_t, v_tp1, _, rho, cut = make_trace(9, (6, 2, 3))
    small = dict(
        rew=rew,
        v_t=v_t[..., 0],
        v_tp1=v_tp1[..., 0],
        discount=torch.tensor([0.9, 0.5, 0.8], dtype=rew.dtype),
        rho=rho[:, :1, 0],
    )
    small = {key: x.clone().requires_grad_() for key, x in small.items()}
    full = {
        key: spread(x.detach(), (6, 2, 3), key == "discount").requires_grad_()
        for key, x in small.items()
    }
    weights = torch.randn(6, 2, 3, dtype=rew.dtype, generator=torch.Generator().manual_seed(0))
    for args in (small, full):
        (broadcasting[name](**args, cut=cut) * weights).sum().backward()
    for key, x in small.items():
        if full[key].grad is None:
            assert x.grad is None
            continue
        whole = full[key].grad
        parts = torch.zeros_like(x)
        for index in np.ndindex(6, 2, 3):
            part = index[3 - x.dim() :] if key == "discount" else index[: x.dim()]
            parts[tuple(i % n for i, n in zip(part, x.shape))] += whole[index]
        torch.testing.assert_close(x.grad, parts)


@pytest.mark.parametrize("name", broadcasting)
def test_arrays_are_left_alone_however_they_lie_in_memory(name):
    full = dict(
        zip(
            ("rew", "v_t", "v_tp1", "discount", "rho", "cut"),
            make_trace(5, (1 if name == "td" else 8, 2)),
        )
    )
    expected = broadcasting[name](**full).numpy()
    plain = as_arrays(full)

    def frozen(x):
        x = x.copy()
        x.flags.writeable = False
        return x

    forms = (np.copy, lambda x: np.flip(np.flip(x).copy()), np.asfortranarray, frozen)
    for form in forms:
        given_ = {key: form(x) for key, x in plain.items()}
        out = broadcasting[name](**given_)
        np.testing.assert_array_equal(out, expected)
        assert not any(np.shares_memory(out, x) for x in given_.values())
        for key, x in plain.items():
            np.testing.assert_array_equal(given_[key], x)


@pytest.mark.parametrize(
    "rew",
    [
        np.zeros((5, 2), int),
        np.zeros((5, 2), ">f4"),
        np.ma.masked_array(np.zeros(5), [1, 0, 0, 0, 0]),
        np.zeros(5, object),
        np.float32(1),
        [1.0, 2.0],
        np.zeros((0, 2)),
        np.zeros(5, complex),
    ],
)
def test_other_arrays_are_refused(rew):
    with pytest.raises(
        DataError, match="rew: not a time-major tensor. Expected a floating point tensor or array"
    ):
        td_errors(rew, 0.0, 0.0, 0.9)
    if isinstance(rew, np.floating):
        return  # a number is fine for the others
    with pytest.raises(DataError, match="v_t: (not a time-major tensor|does not match rew)"):
        td_errors(np.zeros((5, 2)), rew, 0.0, 0.9)


def test_one_kind_at_a_time():
    with pytest.raises(
        DataError,
        match=r"v_t: not a time-major tensor. Expected a number, or ndarray float32 \[5\], like rew, got tensor",
    ):
        td_errors(np.zeros(5, np.float32), torch.zeros(5), 0.0, 0.9)


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.array(0.5, np.float32)])
def test_numbers_of_numpy_count_as_numbers(number):
    x = np.ones(3, np.float32)
    np.testing.assert_array_equal(
        discounted_returns(x, number), np.array([1.75, 1.5, 1.0], np.float32)
    )
    assert discounted_returns(x, number).dtype == np.float32
    if not isinstance(number, np.ndarray):
        assert discounted_returns(torch.ones(3), number).tolist() == [1.75, 1.5, 1.0]


def test_integers_count_as_numbers():
    assert gae(torch.ones(3), 0, 0, 1, 1).tolist() == [3.0, 2.0, 1.0]
    for x, term in (
        (torch.ones(3), torch.tensor([False, True, False])),
        (np.ones(3, np.float32), np.array([False, True, False])),
    ):
        assert discounted_returns(x, 1 * ~term).tolist() == [2.0, 1.0, 1.0]


def test_a_number_that_is_none_is_seen_in_the_result():
    assert math.isnan(td_errors(torch.ones(3), math.nan, 0.0, 0.9)[0])
