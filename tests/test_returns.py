"Returns and advantages against slow oracles written from the formulas, one element at a time, and against identities."

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
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


lambdas = st.floats(0, 1)
CLIPS = [(1.0, 1.0), (0.5, 2.0), (1.0, float("inf")), (1.2, 1.2)]


@settings(deadline=None, max_examples=60)
@given(**traces, n=st.integers(1, 6) | st.just(50), lam=lambdas, clips=st.sampled_from(CLIPS))
@example(0, (17, 2), torch.float32, 3, 0.9, (1.0, 1.0))
def test_estimates_against_the_formulas(seed, shape, dtype, n, lam, clips):
    "Each element alone, in double precision; in any number of trailing dimensions."
    rew, v_t, v_tp1, discount, rho, cut = make_trace(seed, shape, dtype)
    ones = torch.ones_like(rho)
    weights = rho.clamp(max=1.5)

    # Returns of all steps, with and without weights, and of at most n steps
    for rho_of_returns in (weights, ones):
        out = discounted_returns(rew, discount, v_tp1[-1], cut, v_tp1, rho_of_returns)
        expected = elementwise(slow_returns(len(rew)), rew, v_tp1, discount, rho_of_returns, cut)
        assert_like(out, expected, rew)
    out = n_step_returns(rew, v_tp1, discount, n, cut)
    assert_like(out, elementwise(slow_returns(n), rew, v_tp1, discount, ones, cut), rew)

    # Advantages, and the errors of single steps
    out = gae(rew, v_t, v_tp1, discount, lam, cut)
    assert_like(out, elementwise(slow_gae(lam), rew, v_t, v_tp1, discount, cut), rew)
    out = td_errors(rew, v_t, v_tp1, discount)
    every = torch.ones_like(cut)
    assert_like(out, elementwise(slow_gae(0.0), rew, v_t, v_tp1, discount, every), rew)

    # Corrected by clipped weights
    out = vtrace(rew, v_t, v_tp1, discount, rho, lam, *clips, cut)
    args = rew, v_t, v_tp1, discount, rho, cut
    for k, part in enumerate((out.vs, out.adv)):
        oracle = slow_vtrace(lam, *clips)
        expected = elementwise(lambda *column: [row[k] for row in oracle(*column)], *args)  # noqa: B023
        assert_like(part, expected, rew)


@pytest.mark.parametrize("T", [128, 2048])
def test_long_traces_in_single_precision(T):
    rew, v_t, v_tp1, discount, _, cut = make_trace(0, (T, 4), p_end=0.01)
    expected = elementwise(slow_gae(0.95), rew, v_t, v_tp1, discount, cut)
    out = gae(rew.float(), v_t.float(), v_tp1.float(), discount.float(), 0.95, cut)
    assert (out - expected).norm() < 1e-6 * expected.norm()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


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


NAMES = "rew", "v_t", "v_tp1", "discount", "rho", "cut"
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


@pytest.mark.parametrize("name", broadcasting)
def test_episodes_in_one_trace_are_the_episodes_apart(name):
    "And to the last bit: what precedes and what follows an episode leaves no trace in it."
    if name in ("recursion", "running"):
        return  # these know no episodes
    args = dict(zip(NAMES, make_trace(3, (29,), torch.float32, p_end=0.2)))
    ends = args["cut"].nonzero().flatten().tolist()
    bounds = [0, *(t + 1 for t in ends if t < 28), 29]
    assert len(bounds) > 4
    parts = [{key: x[i:j] for key, x in args.items()} for i, j in zip(bounds, bounds[1:])]
    apart = torch.cat([broadcasting[name](**part) for part in parts])
    assert torch.equal(broadcasting[name](**args), apart)


@settings(deadline=None, max_examples=150)
@given(arguments=small_arguments(), name=st.sampled_from(sorted(broadcasting)))
def test_smaller_arguments_stand_for_full_ones(arguments, name):
    "The same bits as with every argument written out, and the kind, dtype and shape of the rewards."
    small, full, numpy = arguments
    fn = broadcasting[name]
    arguments = as_arrays(small) if numpy else small
    if fits_in_two_ways(small["discount"], full["rew"].shape):
        with pytest.raises(DataError, match="(discount|a): fits (rew|b) in two ways"):
            fn(**arguments)
        return
    out = fn(**arguments)
    expected = fn(**full)
    assert type(out) is (np.ndarray if numpy else torch.Tensor)
    out = torch.from_numpy(out) if numpy else out
    assert out.dtype == expected.dtype == full["rew"].dtype and torch.equal(out, expected)


def test_a_number_that_is_none_is_seen_in_the_result():
    assert math.isnan(td_errors(torch.ones(3), math.nan, 0.0, 0.9)[0])


def frozen(x):
    x = x.copy()
    x.flags.writeable = False
    return x


FORMS = {
    "tensors": torch.from_numpy,
    "arrays": np.copy,
    "reversed": lambda x: np.flip(np.flip(x).copy()),
    "Fortran": np.asfortranarray,
    "read only": frozen,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", broadcasting)
def test_arguments_are_left_alone_however_they_lie_in_memory(name, form):
    for n_steps in (1, 8):
        plain = as_arrays(dict(zip(NAMES, make_trace(5, (n_steps, 2)))))
        expected = broadcasting[name](**{key: np.copy(x) for key, x in plain.items()})
        changed = {key: FORMS[form](x.copy()) for key, x in plain.items()}
        out = broadcasting[name](**changed)
        np.testing.assert_array_equal(out, expected)
        if form == "tensors":
            out.zero_()
        assert not any(np.shares_memory(np.asarray(out), np.asarray(x)) for x in changed.values())
        for key, x in plain.items():
            np.testing.assert_array_equal(changed[key], x)


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


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.array(0.5, np.float32)])
def test_numbers_of_numpy_count_as_numbers(number):
    out = discounted_returns(np.ones(3, np.float32), number)
    assert out.dtype == np.float32 and out.tolist() == [1.75, 1.5, 1.0]
    if not isinstance(number, np.ndarray):
        assert discounted_returns(torch.ones(3), number).tolist() == [1.75, 1.5, 1.0]


def test_integers_count_as_numbers():
    assert gae(torch.ones(3), 0, 0, 1, 1).tolist() == [3.0, 2.0, 1.0]
    term = np.array([False, True, False])
    for x, discount in (
        (np.ones(3, np.float32), 1 * ~term),
        (torch.ones(3), 1 * ~torch.from_numpy(term)),
    ):
        assert discounted_returns(x, discount).tolist() == [2.0, 1.0, 1.0]


# --- bad arguments

X = torch.zeros(5, 2)
LIKE_REW = r"Expected tensor float32 \[5, 2\] or its first"
OF_GAE = [  # change of the arguments -> message
    (dict(rew=X.long()), "rew: not a time-major tensor."),
    (dict(rew=torch.tensor(1.0)), "rew: not a time-major tensor."),
    (dict(v_t=X.numpy()), "v_t: not a time-major tensor. .* got ndarray float32"),
    (
        dict(v_t=torch.zeros(6, 2)),
        rf"v_t: does not match rew. {LIKE_REW} dimensions, got tensor float32 \[6, 2\]",
    ),
    (dict(v_tp1=X[0]), r"v_tp1: does not match rew. .* got tensor float32 \[2\]"),
    (dict(v_tp1=X[:1]), r"v_tp1: does not match rew. .* got tensor float32 \[1, 2\]"),
    (dict(v_tp1=X[..., None]), r"v_tp1: does not match rew. .* got tensor float32 \[5, 2, 1\]"),
    (dict(v_tp1=True), "v_tp1: not a time-major tensor. .* got bool True"),
    (dict(discount=X.double()), "discount: does not match rew. .* got tensor float64"),
    (
        dict(discount=[0.9]),
        r"discount: not a time-major tensor. Expected a number, or tensor .*, got list \[0.9\]",
    ),
    (
        dict(discount=torch.zeros(3)),
        rf"discount: does not match rew. {LIKE_REW} or last dimensions, got tensor float32 \[3\]",
    ),
    (dict(cut=X), r"cut: not a mask of the episode ends. Expected tensor bool \[5, 2\]"),
    (dict(cut=X[0].bool()), "cut: not a mask"),
    (dict(cut=X.bool().numpy()), "cut: not a mask of the episode ends. .* got ndarray bool"),
    (dict(lam=-0.1), r"lam: out of range. Expected a number in \[0, 1\], got -0.1"),
    (dict(lam=float("nan")), "lam: out of range"),
]
OF_OTHERS = [  # call -> message
    (lambda: discounted_returns(X[:0], X[:0]), "rew: not a time-major tensor"),
    (lambda: discounted_returns(X, X, X), r"bootstrap: wrong shape. Expected \[2\] or a number"),
    (lambda: discounted_returns(X, X, rho=X[0]), "rho: does not match rew"),
    (lambda: running_returns(X, X, X[:3, 0]), r"before: wrong shape. .*got tensor float32 \[3\]"),
    (lambda: backward_recursion(X[1:], X), "a: does not match b"),
    (lambda: n_step_returns(X, X, X, 0), "n: too few steps. Expected n >= 1, got 0"),
    (lambda: vtrace(X, X, X, X, X[1:]), "rho: does not match rew"),
    (lambda: vtrace(X, X, X, X, X, c_clip=2.0, rho_clip=1.0), "c_clip: out of range"),
    (
        lambda: td_errors(np.zeros(5, np.float32), torch.zeros(5), 0.0, 0.9),
        r"v_t: not a time-major tensor. Expected a number, or ndarray .*like rew, got tensor",
    ),
]


@pytest.mark.parametrize(
    "call, message",
    [
        *((lambda change=change: gae(**{**ZEROS, **change}), text) for change, text in OF_GAE),
        *OF_OTHERS,
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(DataError, match=message):
        call()


ZEROS = dict(rew=X, v_t=X, v_tp1=X, discount=X, lam=0.5, cut=None)
NO_ROWS = {
    "integers": np.zeros((5, 2), int),
    "bytes in another order": np.zeros((5, 2), ">f4"),
    "masked": np.ma.masked_array(np.zeros(5), [1, 0, 0, 0, 0]),
    "objects": np.zeros(5, object),
    "a list": [1.0, 2.0],
    "no rows": np.zeros((0, 2)),
    "complex": np.zeros(5, complex),
}


@pytest.mark.parametrize("name", NO_ROWS)
def test_other_arrays_are_refused(name):
    wrong = NO_ROWS[name]
    text = "rew: not a time-major tensor. Expected a floating point tensor or array"
    with pytest.raises(DataError, match=text):
        td_errors(wrong, 0.0, 0.0, 0.9)
    with pytest.raises(DataError, match="v_t: (not a time-major tensor|does not match rew)"):
        td_errors(np.zeros((5, 2)), wrong, 0.0, 0.9)


def test_a_number_has_no_rows():
    with pytest.raises(DataError, match="rew: not a time-major tensor"):
        td_errors(np.float32(1), 0.0, 0.0, 0.9)


def test_the_bootstrap_of_a_row_that_is_cut_is_not_read():
    cut = torch.tensor([False, True])
    found = discounted_returns(torch.ones(2), 0.5, bootstrap=torch.tensor(torch.nan), cut=cut)
    assert found.tolist() == [1.5, 1.0]
