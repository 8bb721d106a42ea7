"Items in shared memory: whatever they are made of, they arrive as they were, stay so, and nothing grows."

import gc
import multiprocessing
import os
import pickle
import resource
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from copy import deepcopy
from dataclasses import dataclass
from itertools import count, islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_cases import WORLDS, descriptors

from rollpipe.pipes import DataError, Lanes, ProcessReading, Source, nested
from rollpipe.pipes.frames import Stacks
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.pipes.workers.codec import SMALL, pickle_item
from rollpipe.pipes.workers.slots import EMPTY_LAYOUT, Layout, Reply, Slot, SlotWriter, format_of


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Record:
    name: Any
    value: Any


TORCH = [
    getattr(torch, name)
    for name in (
        "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128"
    ).split()
]
NUMPY = [
    "f4",
    "f8",
    "f2",
    ">f4",
    "i8",
    "i1",
    "u2",
    "?",
    "c8",
    "U7",
    "S3",
    "M8[s]",
    [("a", "i4"), ("b", "f8", (2,))],
]
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def tensors(draw):
    "Of any dtype and layout: contiguous, transposed, every second element, expanded, conjugated, negated."
    dtype = draw(st.sampled_from(TORCH))
    shape = draw(shapes)
    x = torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)
    if dtype.is_complex:
        x = x * (1 + 2j)
    form = draw(st.sampled_from(["plain", "t", "step", "expand", "conj", "neg", "flip"]))
    if form == "t" and x.ndim > 1:
        x = x.transpose(0, -1)
    if form == "step" and x.ndim:
        x = x[::2]
    if form == "expand":
        x = x[None].expand(3, *x.shape)
    if form == "conj" and dtype.is_complex:
        x = x.conj()
    if form == "conj" and dtype == torch.complex64:
        x = x.imag
    if form == "neg" and dtype.is_floating_point:
        x = torch._neg_view(x)
    if form == "flip" and x.ndim:
        x = x[1:]
    return x


@st.composite
def arrays(draw):
    dtype = np.dtype(draw(st.sampled_from(NUMPY)))
    shape = draw(shapes)
    x = np.zeros(shape, dtype)
    if dtype.kind in "fiuc":
        x[...] = np.random.randint(0, 100, shape)
    if dtype.kind in "US":
        x[...] = "wort"
    form = draw(st.sampled_from(["plain", "fortran", "step", "back", "read-only"]))
    if form == "fortran":
        x = np.asfortranarray(x) if x.ndim else x
    if form == "step" and x.ndim:
        x = x[::2]
    if form == "back" and x.ndim:
        x = x[::-1]
    if form == "read-only":
        x.flags.writeable = False
    return x


def containers(leaf):
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.builds(Pair, inner, inner),
            st.builds(Record, inner, inner),
            st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
            st.dictionaries(st.text(max_size=3), inner, max_size=2).map(OrderedDict),
        ),
        max_leaves=8,
    )


others = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.just(np.float32(3)),
    st.just(np.array([{"an": "object"}, None])),
    st.just(torch.float32),
    st.just(torch.Size([2, 3])),
)
items = containers(st.one_of(tensors(), arrays(), others)) | containers(
    st.one_of(tensors(), arrays(), st.none())
)


def same(x, y, order=True):
    "Of the same types, dtypes, shapes and values all the way, and plain dicts with keys in the same `order`."
    assert type(x) is type(y), (x, y)
    if isinstance(x, dict):
        assert {(type(k), k) for k in x} == {(type(k), k) for k in y}
        if order or type(x) is not dict:
            assert list(x) == list(y)
        assert getattr(x, "default_factory", None) is getattr(y, "default_factory", None)
        for k in x:
            same(x[k], y[k], order)
    elif isinstance(x, (list, tuple, deque)) and not isinstance(x, torch.Size):
        for name in ("maxlen", "note"):
            assert getattr(x, name, None) == getattr(y, name, None)
        for a, b in zip(x, y, strict=True):
            same(a, b, order)
    elif isinstance(x, Record):
        same((x.name, x.value), (y.name, y.value), order)
    elif isinstance(x, torch.Tensor):
        assert x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y)
    elif isinstance(x, np.ndarray):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert x.tolist() == y.tolist() if x.dtype.hasobject else x.tobytes() == y.tobytes()
    else:
        assert x == y


class Line:
    "One writer and its reader; what the writer tells is pickled on the way."

    def __init__(self, *slots):
        self.slots = slots or (Slot(),)
        self.slot = self.slots[0]
        self.writer = SlotWriter(self.slots)
        self.formats = {}

    def reserve(self, layout):
        for slot in self.slots:
            slot.layout_memory.reserve(layout.size)

    def close(self):
        for slot in self.slots:
            slot.close()

    def empty(self, shape):
        "An array of bytes that the writer makes."
        return torch.from_numpy(self.writer.entries.empty(shape, np.uint8))

    def write(self, item, slot=0, position=0, layout=EMPTY_LAYOUT):
        self.writer.begin(slot, position, layout)
        return self.written(item)

    def written(self, item):
        return Reply(*pickle.loads(pickle.dumps(tuple(self.writer.write(item)))))

    def form(self, written):
        return format_of(written, self.formats)

    def send(self, item, on_release=None, position=0, layout=EMPTY_LAYOUT):
        "What the reader finds of the item."
        form = self.form(self.write(item, 0, position, layout))
        return self.slot.read(form, position, layout, on_release)


@settings(deadline=None, max_examples=150)
@given(item=items, lends=st.booleans())
def test_anything_arrives_as_it_was(item, lends):
    line = Line()
    given_back = []
    received = line.send(item, (lambda: given_back.append(1)) if lends else None)
    same(received, item)
    assert given_back == ([1] if lends else [])  # all of it is small
    line.send(torch.full((10_000,), 255, dtype=torch.uint8))
    same(received, item)
    line.close()


VIEWS = {
    "conjugate": torch.conj,
    "negative": torch._neg_view,
    "imaginary part": lambda x: x.conj().imag,
    "transposed": lambda x: x.mT,
    "expanded": lambda x: x[:1].expand(x.shape),
    "negative conjugate": lambda x: torch._neg_view(x.conj()),
}


@pytest.mark.parametrize("size", [2, 100])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_tensors_whose_memory_is_not_what_they_show(view, size):
    "Alone, beside an array, and in what is pickled; small and large."
    line = Line()
    x = torch.randn(size, size, dtype=torch.complex64)
    for item in ([view(x)], [view(x), np.ones(2)], [view(x), "text"]):
        for lend in (None, lambda: None):
            same(line.send(item, lend), item)


# --- forms


def is_plain(item):
    "Does it consist of arrays and containers?"
    return all(
        type(x) is torch.Tensor or type(x) is np.ndarray and not x.dtype.hasobject
        for x in nested.leaves(item)
    )


@settings(deadline=None, max_examples=60)
@given(
    pool=st.lists(items, min_size=1, max_size=6),
    turns=st.lists(st.integers(0, 5), min_size=1, max_size=15),
    n=st.integers(1, 4),
)
def test_items_of_changing_form(pool, turns, n):
    "In any order, and however few forms are remembered; a form that was just told is not told again."
    line = Line()
    line.writer.MAX_FORMATS = n
    for turn in turns:
        item = pool[turn % len(pool)]
        for repeated in (False, True):
            written = line.write(item)
            same(line.slot.read(line.form(written)), item, order=False)
            assert (written.format_id is not None) == is_plain(item)
            if repeated and is_plain(item):
                assert written.new_format is None
        assert len(line.formats) <= n
    line.close()


class Attributed(namedtuple("Attributed", "x")):
    "A named tuple that takes attributes."


def with_note(note):
    item = Attributed(torch.ones(2))
    if note:
        item.note = note
    return (item,)


A, B, C, D = torch.eye(4)
ORDERED = [{"a": A, "b": B}, {"b": C, "a": D}]
LIKE = {
    "other order of keys": [OrderedDict(x) for x in ORDERED],
    "structures": [torch.eye(3).max(0), torch.eye(3).min(0)],
    "other factory": [defaultdict(int, a=A), defaultdict(list, a=A)],
    "other length": [deque([A], 2), deque([A], 3)],
    "other attributes": [with_note(note) for note in ("x", "y", None, "z")],
    "equal": ORDERED,
}


@pytest.mark.parametrize("likes", LIKE.values(), ids=LIKE)
def test_containers_that_are_nearly_alike(likes):
    "Each arrives as it was, whatever came before; the keys of plain dicts are in the order of the first one."
    line = Line()
    for item in likes * 2:
        same(line.send(item), item, order=likes is not ORDERED)


def test_a_form_is_told_once_if_all_can_be_remembered():
    line = Line()
    for turn in range(3):
        for k in range(SlotWriter.MAX_FORMATS):
            item = torch.full((k,), turn)
            written = line.write(item)
            same(line.slot.read(line.form(written)), item)
            assert (written.new_format is None) == (turn > 0)
            assert len(pickle.dumps(tuple(written))) < 50 or turn == 0
    line.close()


def test_stacks_of_frames_stay_such():
    line = Line()
    for fragment in islice(WORLDS["frames"](2)[0], 3):
        obs = line.send(fragment).state.obs
        assert type(obs) is Stacks and torch.equal(obs.frames, fragment.state.obs.frames)
        assert line.slot.item_memory[0].size < 3 * obs.frames.nbytes + 10**5
    line.close()


# --- lent memory

LARGE = SMALL // 4
KEEPERS = {
    "all": lambda x: x,
    "tensor": lambda x: x["a"],
    "slice": lambda x: x["a"][5:7],
    "numpy of it": lambda x: x["a"].numpy()[::3],
    "other dtype": lambda x: x["a"].view(torch.int32),
    "array": lambda x: x["n"],
    "its slice": lambda x: x["n"][3:].T,
    "its memory": lambda x: memoryview(x["n"]),
    "tensor of it": lambda x: torch.from_numpy(x["n"])[1],
    "stacks": lambda x: x["s"].frames[0],
    # these may have places in the layout
    "whole numbers": lambda x: x["i"],
    "row of them": lambda x: x["i"][1],
    "numpy of them": lambda x: x["i"].numpy()[1:],
    "joined": lambda x: nested.cat([x["i"]], dim=1, view=True),
    "floats": lambda x: x["f"][:, 1:],
    "both": lambda x: (x["f"], x["a"]),
}


@pytest.mark.parametrize("n, places", [(1, ""), (1, "fi"), (2, "fi")])
@pytest.mark.parametrize("keep", KEEPERS.values(), ids=KEEPERS)
def test_a_slot_is_lent_until_the_last_of_it_is_gone(keep, n, places):
    "Large arrays are not copied. Whatever refers to them counts, in both parts of memory. Small ones are."
    frames = torch.arange(LARGE * 4, dtype=torch.float32).view(-1, 2, 2)
    item = dict(
        a=torch.arange(LARGE, dtype=torch.float32),
        n=np.arange(2 * LARGE, dtype="f4").reshape(-1, 2),
        small=torch.arange(9),
        s=Stacks(frames, frames[:0], torch.arange(6).view(1, 2, 3)),
        i=torch.arange(LARGE).view(2, 4, -1),
        f=torch.arange(2.0 * LARGE).view(2, 4, -1),
    )
    layout = Layout(n, [(tuple(item[k].shape), item[k].dtype) for k in places])
    line = Line(Slot(n))
    line.reserve(layout)
    given_back = []
    received = line.send(item, lambda: given_back.append(1), position=n - 1, layout=layout)
    for name in "anif":
        same(received[name], item[name])
    small = received["small"]

    # Nothing but the part refers to the slot.
    part = keep(received)
    del received
    gc.collect()
    assert given_back == []
    del part
    gc.collect()
    assert given_back == [1]

    line.send(dict(a=torch.zeros(4 * LARGE)), position=n - 1, layout=layout)
    assert small.tolist() == list(range(9))
    line.close()


def test_what_is_lent_is_the_memory_itself():
    line = Line()
    form = line.form(line.write(torch.zeros(LARGE)))
    a = line.slot.read(form, on_release=lambda: None)
    b = line.slot.read(form)
    a[0] = 5.0
    assert line.slot.read(form)[0] == 5.0 and b[0] == 0.0
    line.close()
    assert a[0] == 5.0 and len(a.tolist()) == LARGE  # it stays valid, also when the slot is closed
    a += 1


# --- items side by side

DTYPES = [torch.uint8, torch.bool, torch.int64, torch.float32]


class Leaf(NamedTuple):
    shape: tuple
    dtype: torch.dtype
    how: str  # 'made' by the writer, 'plain', or 'turned': not contiguous

    def values(self, seed):
        "Random numbers."
        end = 2 if self.dtype is torch.bool else 100
        values = np.random.default_rng(seed).integers(0, end, self.shape, np.uint8)
        return torch.from_numpy(values).to(self.dtype)

    def array(self, writer, values):
        "An array of that kind with the `values`."
        if self.how == "made":
            dtype = values[:0].numpy().dtype
            return torch.from_numpy(writer.entries.empty(self.shape, dtype)).copy_(values)
        if self.how == "turned":
            return values.transpose(0, 1).contiguous().transpose(0, 1)
        return values.clone()


@st.composite
def large(draw):
    "Shape [T, B, ...] and dtype of an array of at least SMALL bytes."
    dtype = draw(st.sampled_from(DTYPES))
    rest = draw(st.sampled_from([(), (3,), (4, 2)]))
    lead = draw(st.sampled_from([1, 2, 7])), draw(st.integers(1, 3)), *rest
    return (*lead, -(-SMALL // (prod(lead) * dtype.itemsize))), dtype


@st.composite
def groups(draw):
    """`(layout, items)`: the leaves of items that can be joined along dimension 1, and whether it has a name.

    An item with a name is pickled.
    """
    n = draw(st.integers(1, 4))
    common = draw(st.lists(large(), min_size=1, max_size=2))
    layout = Layout(n, draw(st.lists(st.sampled_from(common), max_size=3)))
    kinds = draw(st.lists(st.sampled_from(common) | large(), min_size=1, max_size=3))
    rarely = st.integers(0, 9).map(lambda x: x == 0)
    drawn = []
    for _ in range(n):
        leaves = []
        for (t, b, *rest), dtype in kinds:
            if draw(rarely):
                b = draw(st.integers(1, 4))
            how = draw(st.sampled_from(["made", "made", "plain", "turned"]))
            leaves.append(Leaf((t, b, *rest), dtype, how))
        drawn.append((leaves, draw(rarely)))
    return layout, drawn


def places(layout, leaves, named):
    "Where each leaf should lie, None if not in the layout: the first fit, at first of those made there."
    place_of = [None] * len(leaves)
    if named:
        return place_of
    free = list(range(len(layout.arrays)))
    for in_place in (True, False):
        for j, x in enumerate(leaves):
            fit = [k for k in free if layout.arrays[k] == (x.shape, x.dtype)]
            if place_of[j] is None and fit and in_place <= (x.how == "made"):
                place_of[j] = fit[0]
                free.remove(fit[0])
    return place_of


@pytest.mark.slow
@settings(deadline=None, max_examples=120)
@given(group=groups(), rounds=st.integers(1, 2), data=st.data())
def test_items_side_by_side(group, rounds, data):
    "Written in any order, by one or two writers, they stay apart, and are joined without copies."
    layout, kinds = group
    n = layout.n
    slot = Slot(n)
    lines = [Line(slot) for _ in range(data.draw(st.integers(1, 2)))]
    lines[0].reserve(layout)
    for turn in range(rounds):
        items = {}
        forms = {}
        for position in data.draw(st.permutations(range(n))):
            leaves, named = kinds[position]
            line = lines[position % len(lines)]
            line.writer.begin(0, position, layout)
            values = [x.values((turn, position, j)) for j, x in enumerate(leaves)]
            small = torch.tensor([turn, position])
            item = dict(x=[x.array(line.writer, y) for x, y in zip(leaves, values)], small=small)
            items[position] = dict(x=values, small=small.clone())
            if named:
                item["name"] = items[position]["name"] = "a text"
            written = line.written(item)
            forms[position] = line.form(written)
            if not named:
                check_told(written, values, leaves, places(layout, leaves, named))
            del item
            for p in forms:
                same(slot.read(forms[p], p, layout), items[p])

        # Some items lend their memory.
        lends = [data.draw(st.integers(0, 9)) > 0 for _ in range(n)]
        read = []
        for p, lend in enumerate(lends):
            read.append(slot.read(forms[p], p, layout, (lambda: None) if lend else None))
            same(read[p], items[p])

        order = data.draw(st.just(range(n)) | st.permutations(range(n)))
        for j, leaf in enumerate(kinds[0][0]):
            parts = [read[p]["x"][j] for p in order]
            joined = nested.cat(parts, dim=1, view=True)
            same(joined, torch.cat([items[p]["x"][j] for p in order], 1))

            # Floats lie side by side if they are of one step.
            side_by_side = leaf.dtype is not torch.float32 or leaf.shape[0] == 1
            common_places = {places(layout, *kind)[j] for kind in kinds}
            in_place = len(common_places) == 1 and None not in common_places
            in_order = list(order) == list(range(n))
            at_once = side_by_side and in_place and in_order and all(lends)
            assert (joined.data_ptr() == parts[0].data_ptr()) == (n == 1 or at_once)
        del read, parts, joined
    slot.close()


def check_told(written, values, leaves, place_of):
    "What the writer tells of large leaves without a place, and of the bytes that it copied."
    without_place = []
    n_bytes = 0
    for x, leaf, place in zip(values, leaves, place_of):
        if place is None and x.nbytes >= SMALL:
            without_place.append((leaf.shape, leaf.dtype))
        if place is None or leaf.how != "made":
            n_bytes += x.nbytes  # what was made in its place was not copied
    assert written.unplaced == tuple(without_place)
    assert n_bytes <= written.copied_bytes < n_bytes + 64 * (2 + len(leaves))


SQUARE = (64, 64, 32), torch.uint8
CHANGES = {
    "sliced": lambda x: [x[1:]],
    "its first rows": lambda x: [x[:40]],
    "every second": lambda x: [x[::2]],
    "a row": lambda x: [x[0, 0], x],
    "transposed": lambda x: [x.transpose(0, 1)],
    "transposed and as it was": lambda x: [x.transpose(0, 1), x],
    "used twice": lambda x: [x, x],
    "aliased": lambda x: [x.view(x.shape), x],
    "in another shape": lambda x: [x, x.flatten(1)],
    "another dtype": lambda x: [x.view(torch.int8), x],
    "expanded": lambda x: [x[:1].expand(x.shape), x],
    "flipped": lambda x: [x.flip(0), x],
    "three times": lambda x: [x.transpose(0, 1), x.flip(1), x],
    "copied": lambda x: [x.clone()],
    "with its copy": lambda x: [x.clone(), x],
    "not used": lambda x: [torch.ones_like(x)],
    "an array": lambda x: [x.numpy(), x],
    "an array turned": lambda x: [x.numpy()[::-1].T],
    "with a name": lambda x: ["a name", x, x[3:]],
    "a parameter": lambda x: [torch.nn.Parameter(x, requires_grad=False).data, x],
}


@pytest.mark.parametrize("n_places", [1, 2])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_was_made_in_place_may_be_changed_in_form(change, n, n_places):
    line = Line(Slot(n))
    layout = Layout(n, [SQUARE] * n_places)
    line.reserve(layout)
    items = []
    forms = []
    for position in range(n):
        line.writer.begin(0, position, layout)
        x = line.empty(SQUARE[0]).copy_(torch.randint(0, 255, SQUARE[0]))
        item = [*change(x), torch.tensor(position)]
        items.append(deepcopy(item))
        forms.append(line.form(line.written(item)))
        for lend in (None, lambda: None):
            for p in range(position + 1):
                same(line.slot.read(forms[p], p, layout, lend), items[p])
    line.close()


@settings(deadline=None, max_examples=60)
@given(
    turns=st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=1, max_size=5)),
        max_size=6,
    ),
    n=st.integers(1, 4),
)
def test_layouts_change_from_item_to_item(turns, n):
    "However few forms are remembered; small ones lie elsewhere then, though their form stays the same."
    line = Line()
    other = ((2, SMALL), torch.float32)
    layouts = Layout(), Layout(1, [SQUARE]), Layout(1, [other, SQUARE])
    line.reserve(layouts[-1])
    line.writer.MAX_FORMATS = n
    for k, (number, layout) in enumerate((number, layouts[j]) for number, js in turns for j in js):
        kinds = ((3,), torch.int64), SQUARE, other
        a, b, c = (torch.full(shape, k, dtype=dtype) for shape, dtype in kinds)
        item = ([a], [a, b], [a, b, c], [a, c, b])[number]
        same(line.send(item, (lambda: None) if k % 2 else None, layout=layout), item)
        assert len(line.formats) <= n
    line.close()


@pytest.mark.parametrize("n", [1, 2])
def test_what_was_made_for_one_item_may_be_in_others(n):
    "It is copied to where they are read."
    line = Line(*(Slot(n) for _ in range(3)))
    layout = Layout(n, [SQUARE, SQUARE])
    line.reserve(layout)
    arrays = []
    for k, slot in enumerate(line.slots):
        line.writer.begin(k, n - 1, layout)
        arrays.append(line.empty(SQUARE[0]).fill_(k))
        written = line.written([*arrays[::-1], arrays[0]])
        expected = [torch.full(SQUARE[0], j, dtype=SQUARE[1]) for j in (*range(k, -1, -1), 0)]
        same(slot.read(line.form(written), n - 1, layout), expected)
    for k, x in enumerate(arrays):
        assert (x == k).all()
    line.close()


def test_what_cannot_be_joined_has_no_place():
    "Proposed are large tensors with a dimension 1."
    line = Line()
    big = torch.zeros(2, SMALL)
    item = [big.view(-1), big.numpy(), big[:, :3], big, big[0], big.view(2, -1, 4), big.double()]
    expected = [(tuple(x.shape), x.dtype) for x in (item[3], item[5], item[6])]
    assert line.write(item).unplaced == tuple(expected)
    assert line.write([*item, "text"]).unplaced == ()


@pytest.mark.parametrize("dtype", NUMPY, ids=str)
def test_memory_of_any_kind_is_made(dtype):
    "`empty` is `np.empty`, whether the array is large or not, and whether it has a place or not."
    line = Line(Slot(2))
    layout = Layout(2, [((SMALL, 2), torch.float32)])
    line.reserve(layout)
    line.writer.begin(0, 1, layout)
    for shape in ((3, 2), (SMALL, 2), (SMALL, 2), (0, 5), ()):
        x = line.writer.entries.empty(shape, dtype)
        assert type(x) is np.ndarray and x.flags.writeable
        assert (x.shape, x.dtype) == (shape, np.dtype(dtype))


# --- other processes

fork = multiprocessing.get_context("fork")


def start(context, function, *args):
    "A process with a connection, whose other end is returned."
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(theirs, *args))
    process.start()
    theirs.close()
    return process, ours


def stop(process, link):
    link.send(None)
    process.join()


WIDE = (3, 2, SMALL)


def numbered(number, position):
    return dict(
        x=torch.full(WIDE, number, dtype=torch.uint8),
        f=torch.full(WIDE, 1.0 * number),
        k=torch.tensor([number, position]),
    )


def fill(link, slot, position):
    "For each (number, layout): write an item with that number to `position`."
    line = Line(slot)
    while (message := link.recv()) is not None:
        number, layout = message
        line.writer.begin(0, position, Layout(*layout))
        x = line.empty(WIDE).fill_(number)
        link.send(tuple(line.writer.write(numbered(number, position) | dict(x=x))))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_two_processes_fill_one_slot(method):
    "The layout comes later than the processes, and the first one is replaced. What is read was written last."
    slot = Slot(2)
    context = multiprocessing.get_context(method)
    arrays = [(WIDE, torch.uint8), (WIDE, torch.float32)]
    workers = [(*start(context, fill, slot, position), {}) for position in range(2)]
    try:
        for number, n_arrays in enumerate((0, 1, 2, 2, 2)):
            if number == 3:
                stop(*workers[0][:2])
                workers[0] = *start(context, fill, slot, 0), {}
            layout = Layout(2, arrays[:n_arrays])
            slot.layout_memory.reserve(layout.size)
            for _, link, _ in workers:
                link.send((number, (layout.n, layout.arrays)))

            # Both write, before the first item is looked at.
            read = []
            for position, (_, link, formats) in enumerate(workers):
                written = Reply(*link.recv())
                assert written.unplaced == tuple(arrays[n_arrays:][::-1])
                read.append(slot.read(format_of(written, formats), position, layout, lambda: None))
            for position, item in enumerate(read):
                same(item, numbered(number, position))
            joined = nested.cat([item["x"] for item in read], dim=1, view=True)
            assert (joined == number).all()
            assert (joined.data_ptr() == read[0]["x"].data_ptr()) == (n_arrays > 0)
            del read, item, joined
    finally:
        for process, link, _ in workers:
            stop(process, link)
        slot.close()


# --- what cannot be sent


def test_what_cannot_be_pickled_is_named():
    item = Pair({"good": torch.zeros(2), "bad": [1, (x for x in ())]}, None)
    text = r"leaf Pair.left\['bad'\]\[1\]: .*cannot pickle 'generator' object.*[Gg]ot generator"
    with pytest.raises(DataError, match=text):
        Line().send(item)
    with pytest.raises(DataError, match="leaf generator.*cannot be pickled"):
        Line().send(x for x in ())


UNSENT = {
    "leaf": (lambda x: x.clone().requires_grad_(), "graph of gradients"),
    "result": (lambda x: x.clone().requires_grad_() * 2, "graph of gradients"),
    "meta": (lambda x: x.to("meta"), "on meta"),
    "sparse": (lambda x: x.to_sparse(), "sparse"),
}


@pytest.mark.parametrize("size", [3, 200])
@pytest.mark.parametrize("change, text", UNSENT.values(), ids=UNSENT)
def test_tensors_that_cannot_be_sent(change, text, size):
    "At once, after others of the same form, and among what is pickled; afterwards the writer goes on."
    line = Line()
    good = torch.eye(size)
    bad = change(good)
    text = f"^a tensor cannot be sent to another process.*{text}"
    for k in range(3):
        for item in ({"x": bad}, {"x": bad, "n": "name"}):
            with pytest.raises(DataError, match=text):
                line.write(item)
        same(line.send({"x": good + k}), {"x": good + k})


def test_a_tensor_that_begins_to_require_gradients():
    "The very same one, after it was sent without."
    for x in (torch.zeros(2), torch.zeros(2, SMALL)):
        line = Line()
        for _ in range(2):
            same(line.send([x]), [x])
        x.requires_grad_()
        with pytest.raises(DataError, match="graph of gradients"):
            line.send([x])
        same(line.send([x.detach()]), [x.detach()])


def test_classes_of_a_notebook_travel():
    class Local(NamedTuple):
        x: Any

    namespace = {"__name__": "__main__"}
    exec("class Own:\n def __init__(self, x): self.x = x", namespace)
    line = Line()
    for k in range(3):
        x = torch.arange(k)
        for cls in (Local, namespace["Own"]):
            assert torch.equal(line.send(cls(x)).x, x)
        # Containers of arrays are not pickled again.
        assert line.write(Local(x)).new_format is None


def test_the_form_is_small():
    "Arrays do not travel in it, and next time it is a number."
    fragments = WORLDS["gaussian"](1)[0]
    form, arrays, size = pickle_item(next(iter(fragments)))
    assert len(form) < 3000 and len(arrays) > 10
    assert size == sum(x.nbytes + -x.nbytes % 64 for _, x in arrays)
    line = Line()
    for limit, fragment in zip((6000, 50, 50), fragments):
        assert len(pickle.dumps(tuple(line.write(fragment._replace(final=()))))) < limit


def test_fragments_of_changing_size():
    "Some have many rows of `final`, most have none: memory is that of the largest that came."
    line = Line()
    for k in (0, 500, 3):
        item = {"final": torch.zeros(k, 100)}
        same(line.send(item), item)
    assert 500 * 400 <= line.slot.item_memory[0].size < 500 * 400 + 2**17
    line.close()


# --- nothing grows


def n_objects():
    gc.collect()
    return len(gc.get_objects())


FACTORY = {
    "dict": dict,
    "not to be pickled": lambda x: defaultdict(lambda: 0, x),
    "pickled": lambda x: {**x, "name": "text"},
}


@pytest.mark.slow_but_one
@pytest.mark.parametrize("make", FACTORY.values(), ids=FACTORY)
def test_a_writer_and_its_reader_do_not_grow(make):
    "Over thousands of forms."
    line = Line()
    for k in range(3000):
        if k == 1000:
            before = n_objects()
        received = line.send(make({"x": torch.zeros(k), "y": np.zeros((k % 7, 2))}))
        assert received["x"].shape == (k,)
    assert n_objects() < before + 5000
    line.close()


class Numbers(Source):
    "Small items without end; those with a number of Python are pickled."

    def __init__(self, number=int):
        self.number = number

    def stream(self, items):
        for k in count():
            x = torch.full((10 + k % 50,), k)
            yield dict(k=self.number(k), x=x, y=np.full((3, 4), k, np.float32))


def usage(pids):
    "Resident bytes, descriptors and mappings of each process."

    def of(pid):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return (
            pages * resource.getpagesize(),
            len(os.listdir(f"/proc/{pid}/fd")),
            Path(f"/proc/{pid}/maps").read_text().count("\n"),
        )

    return [of(pid) for pid in pids]


@pytest.mark.slow
@pytest.mark.parametrize("lag, number", [(0, int), (None, torch.tensor)])
def test_nothing_grows_over_ten_thousand_items(lag, number):
    pipe = Lanes(Numbers(number), 2, 0)
    with DataLoader2(pipe, reading_service=ProcessReading(2, lag=lag)) as loader:
        stream = iter(loader)
        every_hundredth = [item for k, item in enumerate(islice(stream, 2000)) if k % 100 == 0]
        loader.reading_service.records = deque(maxlen=10)  # these are meant to be kept
        pids = [os.getpid(), *(state["pid"] for state in loader.reading_service.health())]
        before = usage(pids)
        item = deque(islice(stream, 10_000), maxlen=1)[0]
        after = usage(pids)
        assert item["k"] == 5999 or lag is None
        for k, item in enumerate(every_hundredth):
            assert all((item[name] == 50 * k).all() for name in "xy") and item["k"] == 50 * k
    for (rss, fds, maps), (rss_after, fds_after, maps_after) in zip(before, after):
        assert rss_after - rss < 3 * 2**20 and fds_after <= fds and maps_after <= maps + 5
    gc.collect()


@pytest.mark.slow
def test_nothing_grows_over_many_loaders():
    pipe = Lanes(Numbers(), 2, 0)

    def once():
        with DataLoader2(pipe, reading_service=ProcessReading(2, lag=1)) as loader:
            return next(iter(loader))

    def open_now():
        gc.collect()
        return descriptors(), Path("/proc/self/maps").read_text().count("rollpipe")

    for _ in range(3):
        once()
    before = open_now()
    first = weakref.ref(once()["x"])
    for _ in range(15):
        once()
    after = open_now()
    assert first() is None and after <= before
