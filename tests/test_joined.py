"Large observations of worker processes: made where they are read, joined without a copy, and never overwritten while anybody has them."

import copy
import gc
import os
import signal
from collections import deque
from contextlib import contextmanager
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from reference import assert_same, snapshot
from toys import Plain, Scripted
from worker_cases import change

from rollpipe.pipes import (
    AdvantageBuffer,
    EnvStepper,
    FragmentCollector,
    FragmentStacker,
    Lanes,
    Pipe,
    ProcessReading,
    Source,
    Tap,
)
from rollpipe.pipes.graph.edits import nodes
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.pipes.workers.codec import SMALL

T, B = 4, 2


Endless = partial(Scripted, ends=(False, False), pay=1.0, tell={}, tell_first={})
Pictures = partial(  # each differs from every other one; floats of the same size beside it
    Scripted,
    [(9, "trunc")],
    observation_space=Dict(
        image=Box(0, 255, (96, 80), np.uint8), heat=Box(-np.inf, np.inf, (24, 80), np.float32)
    ),
    see=lambda env: dict(
        image=env.np_random.integers(0, 256, (96, 80), np.uint8),
        heat=env.np_random.normal(size=(24, 80)).astype(np.float32),
    ),
    pay=lambda env: float(env.action),
    tell={},
    tell_first={},
)


class Sees(Plain):
    "Chooses by what it sees."

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        return (
            (obs["image"][..., 0, 0].long() + obs["heat"][..., 0, 0].long().abs() + stepno) % 5,
            (),
            {"seen": obs["image"][..., :9, 0]},
        )


def collector(n_steps=T, n_envs=B):
    return FragmentCollector(EnvStepper(Pictures, Learns(), n_envs), n_steps)


def pipeline(lanes, joined=None, wrap=lambda pipe: pipe, **kwargs):
    pipe = Lanes(wrap(collector(**kwargs)), lanes, 5)
    return pipe if joined is None else FragmentStacker(pipe, joined)


def serial(pipe, n):
    return [snapshot(x) for x in islice(pipe, n)]


@contextmanager
def loaded(pipe, n, **options):
    "`(loader, items)`: the first `n` items from two workers, each of which is that of one process."
    expected = serial(pipe, n)
    options = dict(num_workers=2) | options

    def items(loader):
        for item, known in zip(islice(loader, n), expected, strict=True):
            assert_same(snapshot(item), known)
            yield item

    with DataLoader2(pipe, reading_service=ProcessReading(**options)) as loader:
        yield loader, items(loader)


def last(items):
    "The last one; nobody keeps the others."
    (item,) = deque(items, maxlen=1)
    return item


def run(pipe, n, **options):
    "Each of `n` items is that of one process."
    with loaded(pipe, n, **options) as (_, items):
        last(items)


def pool_of(loader):
    return loader.reading_service.seams[0].coordinator.pool


def is_shared(x, pool):
    "Does it lie in a slot?"
    return any(
        0 <= x.data_ptr() - memory.ctypes.data < memory.size
        for memory in (slot.layout_memory.view() for slot in pool.slots)
    )


assert B * 96 * 80 * (T + 1) >= SMALL


@pytest.mark.slow_but_one
@pytest.mark.parametrize("lag", [0, 1, None])
@pytest.mark.parametrize("lanes, joined", [(2, 2), (3, 3), (3, 2), (2, 4), (2, None)])
def test_the_stream_is_that_of_one_process(lanes, joined, lag):
    "Bit for bit, while the consumer keeps every second batch, to the end of the loader and after it."
    pipe = pipeline(lanes, joined)
    with loaded(pipe, 14, lag=lag) as (loader, items):
        kept = [(batch, snapshot(batch)) for k, batch in enumerate(items) if k % 2]
    del loader, items
    gc.collect()
    for batch, known in kept:
        assert_same(snapshot(batch), known)


@pytest.mark.parametrize(
    "start_method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)]
)
def test_images_are_joined_without_a_copy(start_method):
    "After the first batches, which settle the layout, a worker copies what is small, and the join nothing whole-numbered that is large."
    with loaded(pipeline(2, 2), 8, start_method=start_method) as (loader, items):
        for k, batch in enumerate(items):
            assert batch.state.obs["image"].is_contiguous()
            if k > 2:
                assert all(
                    record.copied_bytes < SMALL
                    for record in list(loader.reading_service.records)[-2:]
                )
        image = batch.state.obs["image"]
        pool = pool_of(loader)
        assert is_shared(image, pool) and not is_shared(batch.state.obs["heat"], pool)


def test_what_is_apart_lies_apart():
    "Floating-point observations of each lane are contiguous, as in one process: what is computed from them is the same to the last bit."
    with DataLoader2(pipeline(2), reading_service=ProcessReading(2)) as loader:
        for fragment in islice(loader, 8):
            assert fragment.state.obs["heat"].is_contiguous()


def test_a_consumer_that_keeps_everything():
    "It gets copies when few slots are left; the pool stays as large as it was."
    with loaded(pipeline(2, 2), 20, lag=1) as (loader, items):
        kept = [(batch, snapshot(batch)) for batch in items]
        pool = pool_of(loader)
        n_lent = sum(is_shared(batch.state.obs["image"], pool) for batch, _ in kept)
        assert 0 < n_lent <= pool.max_lent
        for batch, known in kept:
            assert_same(snapshot(batch), known)


def test_it_is_the_consumers():
    "Who writes into a batch changes no other one, kept or to come."
    last = None
    with loaded(pipeline(2, 2), 10, lag=1) as (_, items):
        for batch in items:
            if last is not None:
                assert (last.state.obs["image"] == 7).all() and (last.state.obs["heat"] == 7).all()
            last = batch
            for x in batch.state.obs.values():
                x.fill_(7)


class Delayed(Pipe):
    "Gives each fragment when it has the next one."

    def stream(self, items):
        last = None
        for item in items:
            if last is not None:
                yield last
            last = item


class Twice(Pipe):
    "Gives each fragment, and the one before beside it."

    def stream(self, items):
        last = None
        for item in items:
            yield {"now": item.state, "before": None if last is None else last.state}
            last = item


class Keeps(FragmentCollector):
    "A collector that gives each fragment again, two fragments later."

    def stream(self, items):
        kept = []
        for fragment in super().stream(items):
            kept.append(fragment)
            yield fragment if len(kept) < 3 else kept.pop(0)


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "wrap",
    [Delayed, Twice, lambda pipe: Keeps(pipe.pipe, T), lambda pipe: FragmentStacker(pipe, 3)],
    ids=["delayed", "twice", "subclass", "stacked"],
)
@pytest.mark.parametrize("lag", [0, 1])
def test_pipes_in_the_worker_may_keep_what_they_get(wrap, lag):
    run(pipeline(2, wrap=wrap), 16, lag=lag)


class Same(Pipe):
    "Passes fragments on."

    reads = 1

    def stream(self, items):
        yield from items


def test_behind_another_pipe_they_are_copied_once():
    "Into the place where they are joined."
    with loaded(pipeline(2, 2, Same), 8) as (loader, items):
        obs = last(items).state.obs
        assert all(
            sum(x.nbytes for x in obs.values()) // 2
            <= record.copied_bytes
            < sum(x.nbytes for x in obs.values()) // 2 + SMALL
            for record in list(loader.reading_service.records)[-2:]
        )
        assert is_shared(obs["image"], pool_of(loader))


class Sizes(Source):
    "Items whose large arrays differ in every way, from lane to lane and from item to item."

    lane = 0

    def set_lane(self, lane, seed):
        self.lane, self.seed = lane, seed

    def stream(self, items):
        rng = np.random.default_rng(self.seed)
        while True:
            t, b = rng.integers(1, 6, 2)
            dtype = [torch.uint8, torch.float32, torch.int64, torch.bool][rng.integers(4)]
            x = torch.from_numpy(rng.integers(0, 2, (t, b, 20_000))).to(dtype)
            yield (
                {"x": x, "flat": x.flatten(), "text": "a"}
                if rng.random() < 0.3
                else {"x": x, "y": x.numpy()[:, :, :100].copy()}
            )


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "order, lag", [("canonical", 0), ("canonical", 2), ("canonical", None), ("ready", 1)]
)
def test_items_of_any_size(order, lag):
    expected = {lane: iter(serial(Lanes(Sizes(), 3, 1), 120)[lane::3]) for lane in range(3)}
    with DataLoader2(
        Lanes(Sizes(), 3, 1), reading_service=ProcessReading(2, lag=lag, order=order)
    ) as loader:
        records = loader.reading_service.records
        for item in islice(loader, 90):
            assert_same(snapshot(item), next(expected[records[-1].lane]))


class Short(Source):
    "Lane k has k + 1 large items."

    lane = 0

    def set_lane(self, lane, seed):
        self.lane = lane

    def stream(self, items):
        for k in range(self.lane + 1):
            yield {"x": torch.full((3, 2, 20_000), 10 * self.lane + k, dtype=torch.uint8)}


@pytest.mark.parametrize("lag", [0, 1, None])
def test_lanes_that_end(lag):
    "What is left goes on in the same order."
    with DataLoader2(Lanes(Short(), 4, 1), reading_service=ProcessReading(2, lag=lag)) as loader:
        assert [int(item["x"].max()) for item in loader] == [0, 10, 20, 30, 11, 21, 31, 22, 32, 33]


def test_a_lost_worker_leaves_half_a_picture():
    "Its place is written anew by the next one; what was read before stays."
    pipe = pipeline(2, 2)
    kept = []
    with DataLoader2(pipe, reading_service=ProcessReading(2, lag=1, restart=3)) as loader:
        for k, batch in enumerate(islice(loader, 16)):
            kept.append((batch, snapshot(batch)))
            if k in (3, 8):
                os.kill(loader.reading_service.health()[k % 2]["pid"], signal.SIGKILL)
            assert (batch.state.rew[1:] == batch.state.act[1:]).all()
            seen = batch.state.obs["image"][..., :9, 0]
            assert torch.equal(batch.actor["seen"], seen)
        assert loader.reading_service.health()[0]["restarted"] == 2
    for batch, known in kept[1::3]:
        assert_same(snapshot(batch), known)


class Learns(Sees):
    "With a weight that it reports."

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(3))

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        act, hx, info = super().forward(obs, act, rew, fin, hx=hx, stepno=stepno, virtual=virtual)
        return act, hx, info | {"weight": self.weight.expand(*stepno.shape, 3)}


# --- actors that answer with what they were shown, whose memory is used again


def from_anywhere(env):
    env.count = env.np_random.integers(100_000)


ANY = Box(-np.inf, np.inf, (8000,), np.float32)
Numbers = partial(Endless, observation_space=ANY, action_space=ANY, begin=from_anywhere)


class Parrot:
    "Says what it sees."

    def step(self, stepno, obs, act, rew, fin, *, hx, virtual):
        return obs, (), {"last": act[..., :2]}

    def reset(self, hx, at):
        return hx


class Elephant(Parrot):
    "Remembers the last three observations."

    def step(self, stepno, obs, act, rew, fin, *, hx, virtual):
        return (
            torch.zeros_like(act),
            (obs, *(hx[:2] if hx else (obs, obs))),
            {"then": hx[2][..., :2] if hx else act[..., :2]},
        )


@pytest.mark.slow_but_one
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("actor", [Parrot(), Elephant()])
@pytest.mark.parametrize("n_steps", [3, 5])
def test_an_answer_that_is_a_view_of_an_observation(actor, n_steps, lag):
    "The next fragment begins with it, when the memory of the one before belongs to another lane."
    run(Lanes(FragmentCollector(EnvStepper(Numbers, actor, 2), n_steps), 4, 1), 24, lag=lag)


# --- what nobody should notice


@pytest.mark.parametrize(
    "start_method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)]
)
def test_a_restart_leaves_the_other_workers_alone(start_method):
    "What the parent knows of their memory stays true while a process is started anew."
    pipe = FragmentStacker(Lanes(FragmentCollector(EnvStepper(Endless, Plain()), 4), 2, 0), 2)
    with DataLoader2(
        pipe, reading_service=ProcessReading(2, restart=1, start_method=start_method)
    ) as loader:
        for k, batch in enumerate(islice(loader, 8)):
            assert int(batch.seq[1]) == k and batch.state.stepno[:, 1].tolist() == list(
                range(4 * k, 4 * k + 5)
            )
            if k == 3:
                os.kill(loader.reading_service.health()[0]["pid"], signal.SIGKILL)


def test_batches_are_saved_and_copied_without_their_neighbours(tmp_path):
    "What is pickled is as large as what is seen."
    with DataLoader2(pipeline(2, 2), reading_service=ProcessReading(2)) as loader:
        batch = list(islice(loader, 6))[-1]
    size = sum(x.nbytes for x in batch.state.obs.values())
    torch.save(batch.state.obs, tmp_path / "obs.pt")
    assert (tmp_path / "obs.pt").stat().st_size < size + 10_000
    assert_same(snapshot(torch.load(tmp_path / "obs.pt")), snapshot(batch.state.obs))
    for x in copy.deepcopy(batch.state.obs).values():
        assert x.untyped_storage().nbytes() == x.nbytes


class Views(torch.nn.Module):
    "A critic that takes `view` for granted."

    def forward(self, obs):
        return obs["image"].view(-1, 96 * 80).float().mean(1).view(obs["image"].shape[:-2])


def test_critics_that_view():
    with loaded(FragmentStacker(AdvantageBuffer(pipeline(2), Views()), 2), 8) as (loader, items):
        assert is_shared(last(items).state.obs["image"], pool_of(loader))


def test_pipes_of_others_see_contiguous_fragments_of_their_own():
    "Between the workers and the join: they may view and keep what they get, and the batch is edited."
    kept = []

    def see(fragment):
        kept.append((fragment, fragment.state.obs["image"].view(-1, 96 * 80).sum(1)))

    pipe = FragmentStacker(Tap(pipeline(2), see), 2)
    with DataLoader2(pipe, reading_service=ProcessReading(2, lag=1)) as loader:
        for batch in islice(loader, 8):
            batch.state.obs["image"].zero_()
    for fragment, total in kept:
        assert torch.equal(fragment.state.obs["image"].view(-1, 96 * 80).sum(1), total)


@pytest.mark.slow
@pytest.mark.parametrize("n_buffers", [None, 8, 12])
def test_versions_do_not_depend_on_what_is_kept(n_buffers):
    "Lanes of different lengths, so that groups do not begin where slots do."

    def versions(keep):
        pipe = FragmentStacker(Lanes(Unequal(collector()), 3, 5), 4)
        actor = next(p for p in nodes(pipe) if isinstance(p, EnvStepper)).actor
        told = []
        kept = []
        with DataLoader2(
            pipe, reading_service=ProcessReading(2, lag=1, n_buffers=n_buffers)
        ) as loader:
            for batch in loader:
                told.append(batch.version.tolist())
                kept = (kept + [batch])[-keep:] if keep else []
                change(actor)
        return told

    assert versions(0) == versions(1) == versions(99)


class Unequal(Pipe):
    "Lane k gives 5 k + 3 items."

    lane = 0

    def set_lane(self, lane, seed):
        self.lane = lane

    def stream(self, items):
        yield from islice(items, 5 * self.lane + 3)


def test_memory_is_that_of_the_pool():
    "Where large arrays lay before their layout was known, nothing is left."
    with DataLoader2(
        pipeline(2, 2), reading_service=ProcessReading(2, lag=1, n_buffers=8)
    ) as loader:
        batch = list(islice(loader, 12))[-1]
        pool = pool_of(loader)
        blocks = sum(
            512 * os.fstat(memory.fd).st_blocks
            for slot in pool.slots
            for memory in (*slot.item_memory, slot.layout_memory)
        )
        fragment = sum(x.nbytes for x in batch.state.obs.values()) // 2
        assert blocks < 8 * (fragment + 2**17)
