"Containers of any nesting: structure, order, aliasing, sharing, and errors that name the leaf."

import multiprocessing
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpipe.pipes import nested
from rollpipe.pipes.data.errors import DataError

Pair = namedtuple("Pair", "z a")
quick = settings(deadline=None, max_examples=25)
scalars = st.integers(-5, 5) | st.floats(-2, 2) | st.booleans()
keys = st.text("abcxyz", min_size=1, max_size=3)


def containers(leaf):
    return st.recursive(
        leaf | st.none(),
        lambda inner: st.one_of(
            st.dictionaries(keys, inner, max_size=3),
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
            st.builds(Pair, inner, inner),
            st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        ),
        max_leaves=8,
    )


def slow_map(fn, tree):
    "The same walk in plain Python, in the order of the container itself."
    if tree is None:
        return None
    if isinstance(tree, dict):
        return type(tree)((k, slow_map(fn, v)) for k, v in tree.items())
    if hasattr(tree, "_fields"):
        return type(tree)(*(slow_map(fn, v) for v in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(slow_map(fn, v) for v in tree)
    return fn(tree)


def identical(a, b):
    "Equal in values, types and order of keys."
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(identical(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(identical(x, y) for x, y in zip(a, b))
    return bool(np.all(a == b))


@quick
@given(containers(scalars))
def test_map_keeps_types_and_order_of_keys(tree):
    assert identical(nested.map(lambda x: (x, x), tree), slow_map(lambda x: (x, x), tree))


@quick
@given(containers(scalars))
def test_paths_reach_the_leaves(tree):
    for path, leaf in zip(nested.paths(tree, "root"), nested.leaves(tree), strict=True):
        assert eval(path, {"root": tree}) is leaf


def test_order_of_keys_does_not_matter_to_leaves():
    assert nested.leaves({"b": 1, "a": 2}) == nested.leaves({"a": 2, "b": 1}) == [2, 1]
    assert list(nested.map(abs, {"b": 1, "a": 2})) == ["b", "a"]
    assert nested.map(lambda x, y: x - y, {"b": 1, "a": 2}, {"a": 2, "b": 1}) == {"b": 0, "a": 0}


def example(lead, kind):
    make = torch.zeros if kind == "torch" else np.zeros
    return {"x": make((*lead, 2)), "y": Pair(make(lead), [make((*lead, 1, 3)), None])}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("other", ["numpy", "torch"])
def test_rows_in_and_out(kind, other):
    buffer = nested.alloc(example((), kind), 4, 5)
    rows = nested.leaves(buffer)

    def write(where, number, lead=()):
        nested.setitem(buffer, where, nested.map(lambda x: x + number, example(lead, other)))

    write(..., 1)
    assert all((x == 1).all() for x in rows)
    write((1, 2), 7)
    assert all((x == 7).all() for x in nested.leaves(nested.getitem(buffer, (1, 2))))
    write(0, 3, lead=(5,))
    for x in rows:
        expected = np.ones((4, 5))
        expected[0], expected[1, 2] = 3, 7
        assert (np.moveaxis(np.asarray(x), (0, 1), (-2, -1)) == expected).all()


def test_scalars_and_graphs_may_be_written():
    npy = np.zeros(3, np.float32)
    pyt = torch.zeros(3, dtype=torch.int64)
    nested.setitem([npy, pyt], 1, [torch.tensor(2.0, requires_grad=True), np.int32(2)])
    nested.setitem([npy, pyt], 2, [5, True])
    assert npy.tolist() == [0, 2, 5] and pyt.tolist() == [0, 2, 1]
    row = np.zeros(()), torch.zeros(())
    nested.setitem(row, ..., (4, np.float64(6)))
    assert row == (4, 6)


@pytest.mark.parametrize(
    "leaf, dtype",
    [
        (np.zeros((2, 3), np.uint8), np.uint8),
        (torch.zeros(2, 3, dtype=torch.bfloat16), torch.bfloat16),
        (np.float32(1), np.float32),
        (2.5, np.float64),
        (3, np.int64),
        (True, np.bool_),
    ],
)
def test_alloc(leaf, dtype):
    (out,) = nested.alloc([leaf], 4, 1)
    assert out.shape == (4, 1, *np.shape(leaf)) and out.dtype == dtype
    assert isinstance(out, torch.Tensor) == isinstance(leaf, torch.Tensor)


dtypes = st.sampled_from([np.float32, np.float64, np.int64, np.int32, np.uint8, np.bool_])
arrays = st.builds(
    lambda shape, dtype: np.ones(shape, dtype), st.lists(st.integers(0, 3), max_size=3), dtypes
)


@quick
@given(
    containers(arrays), st.lists(st.just(1), max_size=2), st.lists(st.integers(0, 3), max_size=2)
)
def test_torchify_and_numpify_there_and_back(tree, unit, leading):
    pyt = nested.torchify(tree, *unit)
    for x, y, z in zip(*map(nested.leaves, (tree, pyt, nested.numpify(pyt))), strict=True):
        assert (
            tuple(y.shape) == (*unit, *x.shape)
            and np.shares_memory(x, z) == bool(x.size)
            and x.dtype == z.dtype
        )
    through_torch = nested.numpify(nested.torchify(tree, *leading, copy=True))
    for repeated in (nested.numpify(tree, *leading, copy=True), through_torch):
        assert identical(repeated, slow_map(lambda x: np.ones((*leading, *x.shape), x.dtype), tree))
        assert not any(map(np.shares_memory, nested.leaves(repeated), nested.leaves(tree)))


def test_what_torch_cannot_alias_is_copied():
    frozen = np.arange(3.0)
    reverse = np.arange(3.0)[::-1]
    frozen.flags.writeable = False
    for x in (frozen, reverse, np.broadcast_to(np.float32(2), (2, 2))):
        (y,) = nested.torchify([x])
        assert y.tolist() == x.tolist()
        y.zero_()
        assert x.max() == 2


def test_copies_carry_no_graph():
    x = torch.ones(2, requires_grad=True)
    assert nested.torchify(x) is x
    assert not nested.torchify(x * 2, copy=True).requires_grad
    assert np.shares_memory(nested.numpify(x), x.detach().numpy())


def add_one(tree):
    nested.map(lambda x: x.add_(1), tree)


def test_shared_memory_is_seen_by_another_process_and_by_numpy():
    pyt = nested.torchify({"x": np.zeros(3), "y": [np.int64(4)]}, shared=True)
    npy = nested.numpify(pyt)
    process = multiprocessing.get_context("forkserver").Process(target=add_one, args=(pyt,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert npy["x"].tolist() == [1, 1, 1] and npy["y"][0] == 5


@pytest.mark.gpu
def test_pinned_memory():
    pyt = nested.torchify({"x": np.zeros(3)}, pinned=True)
    nested.numpify(pyt)["x"][1] = 2
    assert pyt["x"].is_pinned() and pyt["x"][1] == 2
    with pytest.raises(
        DataError, match=r"leaf \['x'\]: .*expected host memory, got a tensor on cuda"
    ):
        nested.numpify({"x": pyt["x"].cuda()})


@pytest.mark.parametrize(
    "leaf", [np.array("text"), "text", object(), np.zeros(2, ">f4"), np.array([{}])]
)
def test_what_is_not_numeric_is_named(leaf):
    with pytest.raises(DataError, match=r"leaf \['a'\]\[1\]: cannot convert"):
        nested.torchify({"a": [1, leaf]})


def test_device_memory_is_named():
    with pytest.raises(
        DataError, match=r"leaf \[0\]: .*expected host memory, got a tensor on meta"
    ):
        nested.numpify([torch.zeros(2, device="meta")])
    with pytest.raises(DataError, match="expected host memory"):
        nested.torchify([torch.zeros(2, device="meta")])


LIKE = {"x": np.zeros((2, 3), np.float32), "y": Pair(torch.zeros(2, dtype=torch.bool), [1.5, None])}


@pytest.mark.parametrize("make", [lambda t: t, nested.torchify, nested.numpify])
def test_a_form_accepts_both_kinds(make):
    tree = make({**LIKE, "y": Pair(LIKE["y"].z, [np.float32(2), None])})
    nested.Form(LIKE, "obs").check(tree)
    nested.Form(tree, "obs").check({**tree, "y": Pair(tree["y"].z, [2.0, None])})


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(x=np.zeros((2, 4), np.float32)),
            "leaf obs['x']: wrong shape. Expected float32 [2, 3], got float32 [2, 4].",
        ),
        (
            dict(x=torch.zeros(2, 3).double()),
            "leaf obs['x']: wrong dtype. Expected float32 [2, 3], got float64 [2, 3].",
        ),
        (dict(x=0.0), "leaf obs['x']: wrong shape. Expected float32 [2, 3], got 0.0."),
        (
            dict(y=Pair(LIKE["y"].z, [1, None])),
            "leaf obs['y'].a[0]: wrong dtype. Expected float64 [], got 1.",
        ),
        (
            dict(y=Pair(torch.zeros(2), [1.0, None])),
            "leaf obs['y'].z: wrong dtype. Expected bool [2], got float32 [2].",
        ),
        (dict(z=1), "obs has the wrong structure: unexpected obs['z']. "),
        (dict(x=None), "obs has the wrong structure: missing obs['x']. "),
        (
            dict(y=LIKE["y"].z),
            "obs has the wrong structure: missing obs['y'].z, missing obs['y'].a[0], unexpected obs['y'].",
        ),
        (
            dict(y=Pair(LIKE["y"].z, (1.0, None))),
            "obs has the wrong structure. Expected {'x': *, 'y': Pair(z=*, a=[*, None])}, "
            "got {'x': *, 'y': Pair(z=*, a=(*, None))}.",
        ),
    ],
)
def test_a_form_names_what_differs(change, message):
    with pytest.raises(DataError) as info:
        nested.Form(LIKE, "obs", pipe="Stepper", lane=1).check({**LIKE, **change})
    assert str(info.value).startswith("Stepper, lane 1") and message in str(info.value)


ARRAYS = nested.numpify(LIKE)
OTHERS = [
    {**ARRAYS, "x": np.zeros((2, 3))},
    {**ARRAYS, "x": np.zeros((3, 2), np.float32)},
    {**ARRAYS, "x": torch.zeros(2, 3)},
    ARRAYS["x"],
    {**ARRAYS, "y": list(ARRAYS["y"])},
    {**ARRAYS, "z": None},
]


def test_equal_forms_differ_in_numbers_only():
    form = nested.Form(ARRAYS)
    assert form == nested.Form(
        nested.map(lambda x: x | True if x.dtype == bool else x + 1, ARRAYS), "of another name"
    )
    assert (
        len({form, nested.Form(ARRAYS), *[nested.Form(x) for x in OTHERS]}) == 1 + len(OTHERS)
        and form != ARRAYS
    )


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.float32, torch.bfloat16, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_large_tensors_are_joined_like_small_ones(dtype, dim):
    xs = [
        torch.randint(0, 2, (3, 800_000, 2)).to(dtype),
        torch.randint(0, 2, (3, 800_000, 2)).to(dtype),
    ]
    joined = nested.cat([{"x": x} for x in xs], dim)["x"]
    assert joined.dtype is dtype and torch.equal(joined, torch.cat(xs, dim))


def test_large_tensors_that_do_not_fit_are_refused_by_name():
    big = torch.zeros(5, 1_000_000)
    for other in (torch.zeros(4, 1_000_000), torch.zeros(5, 10, 10)):
        with pytest.raises(DataError, match="cannot be joined"):
            nested.cat([{"x": big}, {"x": other}], 1)


# --- what lies side by side


def signs(x):
    return x.is_conj(), x.is_neg()


@st.composite
def neighbours(draw):
    "Tensors that may or may not lie side by side in memory, and along which dimension they are to be joined."
    dtype = draw(st.sampled_from([torch.float32, torch.uint8, torch.bool, torch.complex64]))
    shape = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    x = torch.arange(1, 1 + np.prod(shape)).to(dtype).view(shape)
    if dtype.is_complex:
        x = x * (1 + 2j)
    how = draw(
        st.sampled_from(["plain", "plain", "turned", "stepped", "shifted", "expanded", "one"])
    )
    if how == "turned":
        x = x.transpose(0, -1)
    if how == "stepped":
        x = x[..., ::2]
    if how == "shifted":
        x = x[1:]
    if how == "expanded":
        x = x.unsqueeze(at := draw(st.integers(0, x.ndim))).expand(*x.shape[:at], 3, *x.shape[at:])
    if how == "one":
        x = x.unsqueeze(draw(st.integers(0, x.ndim)))
    along = draw(st.integers(0, x.ndim - 1))
    ends = sorted(draw(st.lists(st.integers(0, x.shape[along]), max_size=3)))
    parts = [x.narrow(along, a, b - a) for a, b in zip([0, *ends], [*ends, x.shape[along]])]
    harm = draw(
        st.sampled_from(
            "none none order gap twice overlap copy elsewhere narrower dtype conj neg shape bits shorter".split()
        )
    )
    j = draw(st.integers(0, len(parts) - 1))
    if harm == "order":
        parts = draw(st.permutations(parts))
    if harm == "gap":
        del parts[j]
    if harm == "twice":
        parts.insert(j, parts[j])
    if harm == "overlap":
        parts.append(x)
    if harm == "copy":
        parts[j] = parts[j].clone()
    if harm == "elsewhere":  # at the same place in other memory
        y = parts[j]
        parts[j] = torch.empty(0, dtype=dtype).set_(
            y.untyped_storage().clone(), y.storage_offset(), y.shape, y.stride()
        )
        if y.numel():
            parts[j][(0,) * y.ndim] = 0
    if harm == "narrower" and parts[j].numel():
        parts[j] = parts[j][(slice(None),) * draw(st.integers(0, x.ndim - 1)) + (slice(-1),)]
    if harm == "dtype":
        parts[j] = parts[j].to(torch.complex128 if dtype.is_complex else torch.float64)
    if harm == "conj":
        parts[j] = parts[j].conj()
    if harm == "neg" and dtype not in (torch.bool, torch.uint8):
        parts[j] = torch._neg_view(parts[j])
    if harm == "shape":
        parts[j] = parts[j].transpose(0, -1)
    if harm == "bits" and dtype is torch.uint8:
        parts[j] = parts[j].view(torch.int8)
    if (
        harm == "shorter" and parts[j].numel() and not any(map(any, map(signs, parts)))
    ):  # the same memory, known by another storage
        parts[j] = torch.from_numpy(parts[j].numpy())
    return parts or [x], draw(st.just(along) | st.integers(-x.ndim, x.ndim - 1))


@pytest.mark.slow
@settings(deadline=None, max_examples=1500)
@given(neighbours())
def test_what_lies_side_by_side_is_joined_right(case):
    "With `view` the result is that of `torch.cat`, whatever the tensors share; what cannot be joined is refused."
    parts, dim = case
    before = [x.clone() for x in parts]
    try:
        wanted = torch.cat(before, dim)
    except (RuntimeError, IndexError):
        with pytest.raises((DataError, IndexError)):
            nested.cat(parts, dim, view=True)
        return
    found = nested.cat(parts, dim, view=True)
    assert (
        found.dtype == wanted.dtype and found.shape == wanted.shape and torch.equal(found, wanted)
    )
    assert all(map(torch.equal, parts, before))


@quick
@given(st.lists(st.integers(1, 4), min_size=2, max_size=3), st.data())
def test_what_lies_side_by_side_is_not_copied(shape, data):
    "Cuts of one tensor along any dimension, in order; without `view` they are copied."
    x = torch.arange(np.prod(shape)).view(shape)
    dim = data.draw(st.integers(0, x.ndim - 1))
    cuts = x.split(data.draw(st.integers(1, 2)), dim)
    joined = nested.cat([{"x": y} for y in cuts], dim, view=True)["x"]
    assert (
        joined.shape == x.shape
        and joined.stride() == x.stride()
        and joined.data_ptr() == x.data_ptr()
    )
    assert nested.cat(cuts, dim).data_ptr() != x.data_ptr()
    joined += 1
    assert torch.equal(x, joined)


@pytest.mark.parametrize("make", [lambda x, n: x[:n], lambda x, n: np.frombuffer(x, x.dtype, n)])
@pytest.mark.parametrize("known", range(10, 21))
def test_parts_of_one_memory_that_do_not_know_all_of_it(make, known):
    "The first part belongs to a storage of `known` numbers."
    x = np.arange(20.0)
    for first in (0, 3):
        parts = [torch.from_numpy(make(x, known))[first:10], torch.from_numpy(x)[10:]]
        joined = nested.cat(parts, view=True)
        assert joined.tolist() == x[first:].tolist() and (
            joined.data_ptr() == parts[0].data_ptr()
        ) == (known == 20)


def test_other_leaves_are_joined_with_view_too():
    "Arrays, and what belongs to a graph."
    x = np.arange(6).reshape(2, 3)
    assert np.array_equal(nested.cat([x[:1], x[1:]], view=True), x)
    w = torch.ones(4, 2, requires_grad=True)
    nested.cat([(3 * w)[:2], w[2:]], view=True).sum().backward()
    assert w.grad.tolist() == [[3.0, 3.0]] * 2 + [[1.0, 1.0]] * 2
    (2 * nested.cat([w[:2], w[2:]], view=True)).sum().backward()  # though they lie side by side
    assert w.grad.tolist() == [[5.0, 5.0]] * 2 + [[3.0, 3.0]] * 2
