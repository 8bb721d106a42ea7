"The slots of a coordinator, against a model: what a consumer keeps stays as it is, and there is always a slot for what is under way."

import gc
import os
import random
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpipe.pipes import DataError, nested
from rollpipe.pipes.cluster.ray_crew import ArrivalPool, Arrived
from rollpipe.pipes.cluster.remote import LaneServer, Outbox
from rollpipe.pipes.graph.torchdata import IterDataPipe
from rollpipe.pipes.keeping.random_states import GlobalRandomStates
from rollpipe.pipes.workers.channel import WeightPublisher
from rollpipe.pipes.workers.codec import SMALL
from rollpipe.pipes.workers.entry import Reply
from rollpipe.pipes.workers.slots import Layout, SlotPool, SlotWriter, format_of

BIG = (2, 3, SMALL // 4), torch.uint8  # more than SMALL bytes, [T, B, ...]
REAL = (2, 3, SMALL // 16), torch.float32


def touched(needed, width):
    "How many slots of that width `needed` items in sequence touch at most, wherever they begin."
    return max(len({(first + k) // width for k in range(needed)}) for first in range(width))


def slot_of(x, pool):
    "The slot in whose memory the array lies, as the system tells by its mappings; None if it is a copy."
    at = x.data_ptr() if isinstance(x, torch.Tensor) else x.ctypes.data
    files = {
        os.fstat(memory.fd).st_ino: k
        for k, slot in enumerate(pool.slots)
        for memory in (*slot.item_memory, slot.layout_memory)
    }
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(a, 16) for a in line.split()[0].split("-"))
        if begin <= at < end:
            return files.get(int(line.split()[4]))


class Worker:
    "Writes items of several kinds, whose numbers are all `number`, and knows what its reader knows."

    def __init__(self, pool):
        self.pool = pool
        self.writer = SlotWriter(pool.slots)
        self.formats = {}

    def write(self, slot, position, number, kind="plain"):
        self.writer.begin(slot, position, self.pool.slot_states[slot].layout)
        header = self.writer.write(self.item(number, kind))
        self.pool.propose_layout(header.unplaced)
        return format_of(header, self.formats)

    def item(self, number, kind):
        "Large arrays of odd numbers are made where they are sent from."
        make = (
            (lambda shape: self.writer.entries.empty(shape, np.uint8))
            if number % 2
            else (lambda shape: np.empty(shape, np.uint8))
        )
        item = {
            "big": torch.from_numpy(make(BIG[0])).fill_(number % 256),
            "small": torch.full((5,), number),
        }
        if kind != "other":
            item["real"] = torch.full(REAL[0], number, dtype=REAL[1])
        if kind == "array":
            item["flat"] = np.full(SMALL, number % 256, np.uint8)
        if kind == "text":
            item["text"] = str(number)
        if kind == "small":
            item = {"small": item["small"]}
        if kind == "wider":
            item["big"] = torch.full((2, 4, SMALL // 4), number % 256, dtype=torch.uint8)
        return item


class Lane(IterDataPipe):
    def __iter__(self):
        while True:
            yield self.make()


class RemoteWorker(Worker):
    "As a worker of a cluster, whose items come as bytes that nobody can write to."

    def __init__(self, pool):
        self.lane = Lane()
        publisher = WeightPublisher([])
        self.layout = None
        publisher.publish()
        weakref.finalize(self, publisher.close)
        super().__init__(pool)
        receiver = publisher.receiver([])
        self.server = LaneServer(
            Outbox(), receiver, "worker", {0: self.lane}, {0: GlobalRandomStates()}, None
        )
        receiver.receive(*publisher.packed())
        self.writer = self.server.writer

    def write(self, slot, position, number, kind="plain"):
        layout, before = self.pool.slot_states[slot].layout, self.layout
        self.layout, self.lane.make = layout, lambda: self.item(number, kind)
        reply, data = self.server.serve(
            0, 0, 0, None, None if layout is before else (layout.n, layout.arrays)
        )
        reply = Reply(*reply)
        data = data.copy()
        data.flags.writeable = False
        assert reply.copied_bytes == data.nbytes
        self.pool.propose_layout(reply.unplaced)
        return Arrived(format_of(reply, self.formats), data)


POOLS = {"processes": (SlotPool, Worker), "cluster": (ArrivalPool, RemoteWorker)}
each_kind = pytest.mark.parametrize("pool_type, worker_type", POOLS.values(), ids=POOLS)
KINDS = "plain", "plain", "plain", "array", "other", "text", "small", "wider"


def check(item, number, kind=None):
    "Is it the item with that number?"
    for key, x in item.items():
        if key == "text":
            assert x == str(number)
        else:
            assert (x == (number % 256 if x.dtype in (torch.uint8, np.uint8) else number)).all()


def larges(item):
    return [x for x in item.values() if not isinstance(x, str) and x.nbytes >= SMALL]


PARTS = {
    "all": lambda item: item,
    "one": lambda item: {"big": item["big"]},
    "a row": lambda item: {"big": item["big"][1, :, 7:]},
    "small": lambda item: {"small": item["small"]},
}


class Model:
    "A coordinator and its consumer; it knows of each slot what it should be."

    def __init__(self, pool_type, worker_type, n_buffers, width, needed, in_order, rng):
        self.pool = pool_type(n_buffers, width, needed)
        self.rng = rng
        self.needed = needed
        self.in_order, self.always = (
            in_order,
            (in_order or width == 1) and len(self.pool.slots) >= touched(needed, width),
        )
        self.workers = [worker_type(self.pool) for _ in range(2)]
        self.taken = []
        self.written = []
        self.kept = []
        self.number = 0
        self.is_lent, self.open = (
            {},
            [0] * len(self.pool.slots),
        )  # of each slot; items that were not read so far

    def busy(self, slot):
        return self.open[slot] or any(at == slot for _, _, at in self.kept)

    def take(self):
        if len(self.taken) + len(self.written) < self.needed and self.pool.has_room():
            slot, position = self.pool.take()
            if position == 0:
                assert not self.busy(slot)  # nobody has anything of it
                self.is_lent.pop(slot, None)
                self.open[slot] = self.pool.width
            self.number += 1
            self.taken.append((slot, position, self.number))

    def pick(self, items):
        return items.pop(self.rng.randrange(len(items)))

    def done(self, items):
        "One of `items` that comes next: the oldest of all, or any; None if there is none."
        oldest = min((item[2] for item in self.taken + self.written), default=None)
        fit = [item for item in items if not self.in_order or item[2] == oldest]
        if not fit:
            return None
        items.remove(item := self.rng.choice(fit))
        return item

    def write(self):
        if not self.taken:
            return
        slot, position, number = self.pick(self.taken)
        kind = self.rng.choice(KINDS)
        self.written.append(
            (
                slot,
                position,
                number,
                self.rng.choice(self.workers).write(slot, position, number, kind),
                kind,
            )
        )

    def end(self):
        "There was no item."
        if self.rng.random() < 0.7 or (item := self.done(self.taken)) is None:
            return
        self.pool.give_back(item[0])
        self.open[item[0]] -= 1

    def read(self):
        if (item := self.done(self.written)) is None:
            return
        slot, position, number, form, _ = item
        if slot not in self.is_lent:
            others = sum(lent and bool(self.busy(k)) for k, lent in self.is_lent.items())
            self.is_lent[slot] = others < self.pool.max_lent
        item = self.pool.read(slot, position, form)
        self.open[slot] -= 1
        check(item, number)
        assert [slot_of(x, self.pool) for x in larges(item)] == [
            slot if self.is_lent[slot] else None
        ] * len(larges(item))
        part = PARTS[
            self.rng.choice(["all", "all", "all", "one", "a row"]) if "big" in item else "small"
        ](item)
        at = (
            slot
            if self.is_lent[slot] and any(key != "small" for key in part) and larges(item)
            else None
        )
        self.kept.append((number, part, at))
        if self.rng.random() < 0.5:
            self.drop()

    def drop(self):
        if self.kept:
            self.pick(self.kept)

    def check(self):
        for number, item, _ in self.kept:
            check(item, number)
        assert len({at for *_, at in self.kept} - {None}) <= self.pool.max_lent
        # whatever is kept, there is always something that can be done
        under_way = len(self.taken) + len(self.written)
        if not under_way or self.always and under_way < self.needed:
            assert self.pool.has_room()

    def settle(self):
        "Read all that is under way, keep what was kept; then fill the last slot."
        while self.taken:
            self.write()
        while self.written:
            self.read()
        while self.pool.position < self.pool.width:
            self.pool.give_back(self.pool.take()[0])
            self.open[self.pool.filling] -= 1

    def capacity(self):
        "How many items can be taken at once; they are given back."
        found = []
        while self.pool.has_room():
            found.append(self.pool.take())
        for slot, _ in found:
            self.pool.give_back(slot)
        assert len(set(found)) == len(found)
        return len(found)


@pytest.mark.slow
@each_kind
@settings(deadline=None, max_examples=60)
@given(
    width=st.integers(1, 3),
    n_slots=st.integers(1, 5),
    needed=st.integers(1, 9),
    extra=st.integers(0, 2),
    in_order=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_a_consumer_may_keep_what_it_likes(
    pool_type, worker_type, width, n_slots, needed, extra, in_order, seed
):
    "What is kept never changes; at most `max_lent` slots are lent, and all that can be; when all is dropped, all slots are there again."
    model = Model(
        pool_type,
        worker_type,
        n_slots * width + extra % width,
        width,
        needed,
        in_order,
        rng := random.Random(seed),
    )
    pool = model.pool
    assert len(pool.slots) == n_slots and pool.max_lent == max(0, n_slots - touched(needed, width))
    weights = [rng.randint(1, 6) for _ in range(5)]
    for _ in range(80):
        rng.choices([model.take, model.write, model.read, model.drop, model.end], weights)[0]()
        model.check()
    model.settle()
    for number, item, _ in model.kept:
        check(item, number)
    assert model.capacity() >= min(
        needed, n_slots * width
    )  # the kept ones take nothing from those that are needed
    for number, item, _ in model.kept:
        check(item, number)
    item = None
    model.kept.clear()
    gc.collect()
    assert model.capacity() == n_slots * width
    pool.close()


def filled(pool, worker, number, kind="plain"):
    "A whole slot of items, written and read in order."
    items = []
    for _ in range(pool.width):
        assert pool.has_room()
        slot, position = pool.take()
        items.append(pool.read(slot, position, worker.write(slot, position, number, kind)))
    return items


@each_kind
@pytest.mark.parametrize("width", [1, 2, 3])
def test_what_is_joined_keeps_the_slot(pool_type, worker_type, width):
    "Though it has the memory of the first item alone, as the others are gone. Floats are joined by a copy, which keeps nothing."
    n = 3 + touched(width, width)
    pool = pool_type(n * width, width, width)
    worker = worker_type(pool)
    for k in range(2):
        filled(pool, worker, k)
    kept = []
    for k in range(2, 6):
        items = [{key: item[key] for key in ("big", "real")} for item in filled(pool, worker, k)]
        kept.append((k, nested.cat(items, dim=1, view=True)))
        assert kept[-1][1]["big"].shape == (2, 3 * width, SMALL // 4)
    del items
    # the last one came when there were too few slots left to lend another one
    assert [slot_of(item["big"], pool) is not None for _, item in kept] == [True] * 3 + [False]
    assert [slot_of(item["real"], pool) is not None for _, item in kept] == [width == 1] * 3 + [
        False
    ]
    for k in range(6, 9):
        filled(pool, worker, k)
    for k, item in kept:
        check(item, k)
    pool.has_room()
    assert len(pool.free) == n - 3
    kept.pop(1)
    item = None
    gc.collect()
    pool.has_room()
    assert len(pool.free) == n - 2
    pool.close()


@given(
    st.lists(st.sampled_from([(), (BIG,), (REAL,), (BIG, REAL), (REAL, BIG)]), max_size=8),
    st.integers(1, 3),
)
def test_the_layout_is_what_two_items_in_a_row_agree_on(proposals, width):
    "Once and for all; those that disagree never settle it, nor do those without large arrays."
    pool = SlotPool(6, width, 1)
    agreed = [a for a, b in zip(proposals, proposals[1:]) if a == b and a]
    for large in proposals:
        pool.propose_layout(large)
    assert pool.layout.arrays == (agreed[0] if agreed else ()) and pool.layout.n == width
    assert all(
        state.layout.arrays == () for state in pool.slot_states
    )  # of slots that have not been taken since
    slot, _ = pool.take()
    assert pool.slot_states[slot].layout is pool.layout
    assert (
        pool.slots[slot].layout_memory.size
        >= pool.layout.size
        == Layout(width, pool.layout.arrays).size
    )
    pool.close()


def test_slots_that_were_taken_before_the_layout_was_settled_keep_theirs():
    "Their items are read by the layout that they were written with."
    pool = SlotPool(8, 2, 2)
    worker = Worker(pool)
    early = [pool.take() for _ in range(6)]
    forms = [worker.write(*at, number) for number, at in enumerate(early)]
    assert pool.layout.arrays and not any(pool.slot_states[slot].layout.arrays for slot, _ in early)
    late = filled(pool, worker, 7)
    found = [pool.read(*at, form) for at, form in zip(early, forms)]
    for number, item in enumerate(found):
        check(item, number)
    for item in late:
        check(item, 7)
    at_once = [
        nested.cat([x["big"], y["big"]], 1, view=True).data_ptr() == x["big"].data_ptr()
        for x, y in (late, found[:2])
    ]
    assert at_once == [True, False]
    used = lambda: [
        os.fstat(memory.fd).st_blocks * 512 for slot in pool.slots for memory in slot.item_memory
    ]
    assert max(used()) > BIG[0][0] * BIG[0][1] * BIG[0][2]
    late = found = item = None
    gc.collect()
    while pool.has_room():
        early.append(pool.take())
    assert max(used()) <= SMALL  # large arrays will not lie there any more
    pool.close()


def test_who_keeps_nothing_has_the_same_slot_again():
    "Processor caches may still have it."
    pool = SlotPool(8, 2, 2)
    worker = Worker(pool)
    assert len({slot_of(filled(pool, worker, k)[0]["big"], pool) for k in range(10)}) == 1
    pool.close()


def test_items_may_be_dropped_by_any_thread():
    pool = SlotPool(6, 2, 2)
    worker = Worker(pool)
    for k in range(40):
        items = filled(pool, worker, k)
        thread = threading.Thread(target=items.clear)
        thread.start()
        thread.join()
        pool.has_room()
        assert len(pool.free) == 3
    pool.close()


def test_warming_up_changes_nothing():
    "It makes no difference to what is read."
    pool = SlotPool(3, 1, 1)
    worker = Worker(pool)
    pool.warm_up()
    for k, kind in enumerate(KINDS * 2):
        assert pool.has_room()
        slot, position = pool.take()
        form = worker.write(slot, position, k, kind)
        for _ in range(k % 3):
            pool.warm_up()
        check(pool.read(slot, position, form), k)
    pool.close()


def usage():
    "Mappings of shared memory, and what the garbage collector knows of."
    gc.collect()
    return Path("/proc/self/maps").read_text().count("rollpipe"), len(gc.get_objects())


@pytest.mark.slow
def test_nothing_grows_over_thousands_of_items():
    "While some of them are always kept."
    rng = random.Random(0)
    pool = SlotPool(12, 3, 5)
    kept = []
    worker = Worker(pool)
    for k in range(700):
        if k == 100:
            before = usage()
        kept.append((k, filled(pool, worker, k, rng.choice(KINDS))))
        if len(kept) > 4:
            kept.pop(rng.randrange(5))
        for number, items in kept:
            for item in items:
                check(item, number)
    maps, objects = usage()
    assert maps <= before[0] + 4 and objects < before[1] + 2000
    pool.close()


def test_a_layout_for_which_a_worker_of_a_cluster_has_no_memory():
    "The error is that of the lane that needs it."
    pool = ArrivalPool(2, 1, 1)
    worker = RemoteWorker(pool)
    with pytest.raises(DataError, match="not enough memory"):
        worker.server.serve(0, 0, 0, None, (1, (((2, 2**45), torch.uint8),)))
    assert worker.server.lane == 0
    pool.close()
