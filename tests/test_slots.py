"Items in shared memory: whatever they consist of, they arrive as they were, stay as they are, and nothing grows."
import gc
import multiprocessing
import os
import random
import resource
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from crews import WORLDS, descriptors
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_same, snapshot

from rollpipe.pipes import DataError, Lanes, ProcessReading, Source, Stacks
from rollpipe.pipes.slots import SMALL, Slot, pickled
from rollpipe.pipes.torchdata import DataLoader2


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Record:
    name: Any
    value: Any


TORCH = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
         torch.bool, torch.complex64, torch.complex128]
NUMPY = ["f4", "f8", "f2", ">f4", "i8", "i1", "u2", "?", "c8", "U7", "S3", "M8[s]", [("a", "i4"), ("b", "f8", (2,))]]
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def tensors(draw):
    "Of any dtype and layout: contiguous, transposed, every second element, expanded, conjugated."
    dtype, shape = draw(st.sampled_from(TORCH)), draw(shapes)
    x = torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)
    if dtype.is_complex: x = x * (1 + 2j)
    form = draw(st.sampled_from(["plain", "t", "step", "expand", "conj", "flip"]))
    if form == "t" and x.ndim > 1: x = x.transpose(0, -1)
    if form == "step" and x.ndim: x = x[::2]
    if form == "expand": x = x[None].expand(3, *x.shape)
    if form == "conj" and dtype.is_complex: x = x.conj()
    if form == "conj" and dtype == torch.complex64: x = x.imag
    if form == "flip" and x.ndim: x = x[1:]
    return x


@st.composite
def arrays(draw):
    dtype, shape = np.dtype(draw(st.sampled_from(NUMPY))), draw(shapes)
    x = np.zeros(shape, dtype)
    if dtype.kind in "fiuc": x[...] = np.random.randint(0, 100, shape)
    if dtype.kind in "US": x[...] = "wort"
    form = draw(st.sampled_from(["plain", "fortran", "step", "back", "read-only"]))
    if form == "fortran": x = np.asfortranarray(x) if x.ndim else x
    if form == "step" and x.ndim: x = x[::2]
    if form == "back" and x.ndim: x = x[::-1]
    if form == "read-only": x.flags.writeable = False
    return x


others = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(), st.just(np.float32(3)),
                   st.just(np.array([{"an": "object"}, None])), st.just(torch.float32), st.just(torch.Size([2, 3])))
items = st.recursive(st.one_of(tensors(), arrays(), others), lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.builds(Pair, inner, inner), st.builds(Record, inner, inner),
    st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    st.dictionaries(st.text(max_size=3), inner, max_size=2).map(OrderedDict)), max_leaves=8)


def same(x, y):
    "Of the same types all the way, the same dtypes, shapes and values."
    assert type(x) is type(y), (x, y)
    if isinstance(x, dict):
        assert list(x) == list(y)
        for k in x: same(x[k], y[k])
    elif isinstance(x, (list, tuple)) and not isinstance(x, torch.Size):
        assert len(x) == len(y)
        for a, b in zip(x, y): same(a, b)
    elif isinstance(x, Record): same((x.name, x.value), (y.name, y.value))
    elif isinstance(x, torch.Tensor): assert x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y)
    elif isinstance(x, np.ndarray):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert x.tolist() == y.tolist() if x.dtype.hasobject else x.tobytes() == y.tobytes()
    else: assert x == y


@settings(deadline=None, max_examples=150)
@given(item=items, lends=st.booleans())
def test_anything_arrives_as_it_was(item, lends):
    slot, given_back = Slot(), []
    form, size = slot.write(item)
    found = slot.read(form, size, (lambda: given_back.append(1)) if lends else None)
    same(found, item)
    assert given_back == ([1] if lends else [])                 # all of it is small
    slot.write(torch.full((10_000,), 255, dtype=torch.uint8))
    same(found, item)
    slot.close()


@settings(deadline=None, max_examples=40)
@given(batch=st.lists(items, min_size=2, max_size=6))
def test_a_slot_takes_one_item_after_the_other(batch):
    slot = Slot()
    for item in batch: same(slot.read(*slot.write(item)), item)
    slot.close()


@pytest.mark.parametrize("world", WORLDS)
def test_fragments(world):
    "Of every kind of pipeline; stacks of frames stay such."
    slot = Slot()
    for fragment in islice(WORLDS[world](2)[0], 3):
        found = slot.read(*slot.write(fragment))
        assert type(found) is type(fragment)
        assert_same(snapshot(found), snapshot(fragment))
        if world == "frames":
            obs = found.state.obs
            assert type(obs) is Stacks and torch.equal(obs.frames, fragment.state.obs.frames)
            assert slot.memory.size < 3 * obs.frames.nbytes + 10 ** 5
    slot.close()


LARGE = SMALL // 4


KEEPERS = {"all": lambda x: x, "tensor": lambda x: x["a"], "slice": lambda x: x["a"][5:7], "numpy of it": lambda x: x["a"].numpy()[::3],
           "other dtype": lambda x: x["a"].view(torch.int32), "array": lambda x: x["n"], "its slice": lambda x: x["n"][3:].T,
           "its memory": lambda x: memoryview(x["n"]), "tensor of it": lambda x: torch.from_numpy(x["n"])[1],
           "stacks": lambda x: x["s"].frames[0]}


@pytest.mark.parametrize("keep", KEEPERS.values(), ids=KEEPERS)
def test_a_slot_is_lent_until_the_last_of_it_is_gone(keep):
    "Large arrays are not copied; whatever refers to them counts."
    slot, given_back = Slot(), []
    frames = torch.arange(LARGE * 4, dtype=torch.float32).view(-1, 2, 2)
    item = dict(a=torch.arange(LARGE, dtype=torch.float32), n=np.arange(2 * LARGE, dtype="f4").reshape(-1, 2), small=torch.arange(9),
                s=Stacks(frames, frames[:0], torch.arange(6).view(1, 2, 3)))
    found = slot.read(*slot.write(item), lambda: given_back.append(1))
    small = found["small"]
    kept = keep(found)
    assert given_back == []
    del found
    gc.collect()
    assert given_back == []                                     # what is small is a copy and does not keep the slot
    del kept
    gc.collect()
    assert given_back == [1]
    slot.write(dict(a=torch.zeros(4 * LARGE)))
    assert small.tolist() == list(range(9))
    slot.close()


def test_what_is_lent_is_the_memory_itself():
    slot = Slot()
    form, size = slot.write(torch.zeros(LARGE))
    a, b = slot.read(form, size, lambda: None), slot.read(form, size)
    a[0] = 5.
    assert slot.read(form, size)[0] == 5. and b[0] == 0.
    slot.close()
    assert a[0] == 5. and len(a.tolist()) == LARGE               # it stays valid, also when the slot is closed
    a += 1


def test_a_pool_of_two_over_thousands_of_items():
    "A consumer keeps some of them, in any order, for any time; a slot is taken again only when it was given back."
    rng, slots, kept = random.Random(0), [Slot(), Slot(), Slot()], []
    free = deque(range(3))
    for k in range(3000):
        if not free: kept.clear()
        slot = free.popleft()
        form, size = slots[slot].write(dict(k=k, x=torch.full((LARGE,), k), y=np.full(7, k)))
        if len(free) < 1: found = slots[slot].read(form, size); free.append(slot)
        else: found = slots[slot].read(form, size, lambda slot=slot: free.append(slot))
        if rng.random() < 0.1: kept.append(found)
        if len(kept) > 20: kept.pop(rng.randrange(20))
        for item in rng.sample(kept, min(2, len(kept))): assert (item["x"] == item["k"]).all() and (item["y"] == item["k"]).all()
    del found
    kept.clear()
    gc.collect()
    assert sorted(free) == [0, 1, 2]
    for slot in slots: slot.close()


def test_slots_of_other_processes():
    "One writes more and more, the other reads; then the roles change."
    fork = multiprocessing.get_context("fork")
    slot = Slot()
    ours, theirs = fork.Pipe()
    def child():
        for k in range(1, 8): theirs.send(slot.write({"x": torch.full((10 ** k // 4,), k), "k": k}))
        theirs.send(int(slot.read(*theirs.recv()).sum()))
    process = fork.Process(target=child)
    process.start()
    for k in range(1, 8):
        form, size = ours.recv()
        if k == 7:
            found = slot.read(form, size)
            assert found["k"] == 7 and (found["x"] == 7).all() and len(found["x"]) == 10 ** 7 // 4
    ours.send(slot.write(torch.ones(10 ** 7)))
    assert ours.recv() == 10 ** 7
    process.join()
    slot.close()


# --- what cannot be sent

def test_what_cannot_be_pickled_is_named():
    slot = Slot()
    item = Pair({"good": torch.zeros(2), "bad": [1, (x for x in ())]}, None)
    told = r"leaf Pair.left\['bad'\]\[1\]: .*cannot pickle 'generator' object.*[Gg]ot generator"
    with pytest.raises(DataError, match=told): slot.write(item)
    with pytest.raises(DataError, match="leaf generator.*cannot be pickled"): slot.write(x for x in ())


def test_tensors_that_cannot_be_sent():
    slot = Slot()
    for x, told in ((torch.zeros(2, requires_grad=True), "graph of gradients"), (torch.zeros(2, device="meta"), "on meta"),
                    (torch.eye(3).to_sparse(), "sparse"), ((torch.ones(2, requires_grad=True) * 2), "graph of gradients")):
        with pytest.raises(DataError, match=f"a tensor cannot be sent to another process.*{told}"): slot.write({"x": x})


def test_classes_of_a_notebook_travel():
    class Local(NamedTuple):
        x: Any
    namespace = {"__name__": "__main__"}
    exec("class Own:\n def __init__(self, x): self.x = x", namespace)
    slot = Slot()
    assert slot.read(*slot.write(Local(torch.arange(3)))).x.tolist() == [0, 1, 2]
    assert slot.read(*slot.write(namespace["Own"](torch.arange(3)))).x.tolist() == [0, 1, 2]


def test_the_form_is_small():
    "Arrays do not travel in it."
    form, arrays, size = pickled(next(iter(WORLDS["gaussian"](1)[0])))
    assert len(form) < 3000 and len(arrays) > 10 and size == sum(x.nbytes + -x.nbytes % 64 for _, x in arrays)


def test_fragments_of_changing_size():
    "Some have many rows of `final`, most have none: memory is that of the largest, not of the largest possible."
    slot = Slot()
    for k in (0, 500, 3): same(slot.read(*slot.write({"final": torch.zeros(k, 100)})), {"final": torch.zeros(k, 100)})
    assert 500 * 400 <= slot.memory.size < 500 * 400 + 2 ** 17
    slot.close()


# --- nothing grows

class Numbers(Source):
    "Small items without end."
    def stream(self, items):
        k = 0
        while True:
            yield {"k": k, "x": torch.full((10 + k % 50,), k), "y": np.full((3, 4), k, np.float32)}
            k += 1


def usage(pids):
    "Resident bytes, descriptors and mappings of each process."
    def of(pid):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize(), len(os.listdir(f"/proc/{pid}/fd")), Path(f"/proc/{pid}/maps").read_text().count("\n")
    return [of(pid) for pid in pids]


@pytest.mark.parametrize("lag", [0, None])
def test_nothing_grows_over_ten_thousand_items(lag):
    with DataLoader2(Lanes(Numbers(), 2, 0), reading_service=ProcessReading(2, lag=lag)) as loader:
        stream = iter(loader)
        kept = []
        for k, item in enumerate(islice(stream, 2000)):
            if k % 100 == 0: kept.append(item)
        loader.reading_service.records = deque(maxlen=10)        # these are meant to be kept
        pids = [os.getpid(), *(state["pid"] for state in loader.reading_service.health())]
        before = usage(pids)
        item = deque(islice(stream, 10_000), maxlen=1)[0]
        after = usage(pids)
        assert item["k"] == 5999 or lag is None
        for k, item in enumerate(kept): assert item["k"] == 50 * k and (item["x"] == 50 * k).all() and (item["y"] == 50 * k).all()
    for (rss, fds, maps), (rss_after, fds_after, maps_after) in zip(before, after):
        assert rss_after - rss < 3 * 2 ** 20 and fds_after <= fds and maps_after <= maps + 5
    gc.collect()


def test_nothing_grows_over_many_loaders():
    pipe = Lanes(Numbers(), 2, 0)
    def once():
        with DataLoader2(pipe, reading_service=ProcessReading(2, lag=1)) as loader: return next(iter(loader))
    for _ in range(3): once()
    gc.collect()
    before = descriptors(), Path("/proc/self/maps").read_text().count("rollpipe")
    there = weakref.ref(once()["x"])
    for _ in range(15): once()
    gc.collect()
    assert there() is None and (descriptors(), Path("/proc/self/maps").read_text().count("rollpipe")) <= before
