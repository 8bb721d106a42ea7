"A memory that goes on from its state draws what the first one would have drawn, bit for bit, whatever happens while it is saved."

import errno
import os
import random
import resource
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forked, run_forked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_fragments import fragments
from reference import assert_same, snapshot
from test_replay import collected

from rollpipe.agents.checkpoint import load_checkpoint, save_checkpoint
from rollpipe.pipes import CheckpointError, ReplayMemory
from rollpipe.pipes.data.fragment_ops import join
from rollpipe.pipes.keeping import chunks as chunks_module
from rollpipe.pipes.keeping.chunks import ChunkFolder, RowChanges


class Nobody:
    "A learner without a state."

    def state_dict(self):
        return {}


def save(path, memory, chunks, counters=None):
    save_checkpoint(path, Nobody(), {}, counters or {}, pipes=dict(memory=memory.get_state(chunks)))
    if chunks is not None:
        chunks.sweep([path])


def load(checkpoint, chunks, *args, **options):
    memory = ReplayMemory(*args, **options)
    memory.set_state(load_checkpoint(checkpoint).pipes["memory"], chunks)
    return memory


def used(memory, n=7):
    "Draw from a memory and set priorities. Returns all that was drawn."
    if not memory.sampler.n_segments:
        return None
    sample = memory.sample(n)
    if memory.prioritized:
        memory.prioritize(
            sample.index,
            torch.arange(1.0, n + 1) * float(sample.fragment.state.rew.abs().mean() + 0.1),
        )
    return snapshot(tuple(sample))


def contents(memory):
    "All numbers in which two memories may differ."
    state = memory.get_state()
    sampler = memory.sampler
    rows = {
        name: [None if x is None else x.numpy() for x in saved["chunks"]]
        for name, saved in state["rows"].items()
    }
    bits = (
        {}
        if memory.store is None
        else dict(records=memory.store.records.tobytes(), free=memory.store.finals.free)
    )
    return [
        repr(rows),
        bits,
        sampler.rng.bit_generator.state,
        sampler.starts.tolist(),
        getattr(sampler, "max_priority", 0),
        sampler.tree.nodes.tolist() if memory.prioritized else 0,
    ]


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks_module, "CHUNK", 256)


def stream(world, gaps, joined, n=12):
    "Fragments of two lanes, some of which are missing; joined or one by one."
    lanes = [collected(world, lane) for lane in range(2)]
    found = []
    for k in range(n):
        if k in gaps:
            continue
        found += [join([lanes[0][k], lanes[1][k]])] if joined else [lanes[0][k], lanes[1][k]]
    return found


@pytest.mark.slow
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(["plain", "memory", "nested"]),
    st.integers(16, 90),
    st.integers(4, 6),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sets(st.integers(0, 11), max_size=3),
    st.integers(0, 20),
    st.sampled_from(["tree", "chunks", "mapped", "file"]),
)
def test_both_go_on_alike(
    small_chunks,
    tmp_path_factory,
    world,
    capacity,
    length,
    prioritized,
    zero_state,
    joined,
    gaps,
    at,
    how,
):
    "Rings that wrap around, segments that are not complete, stored recurrent states, lanes whose fragments are missing, priorities."
    folder = tmp_path_factory.mktemp("run")
    options = dict(
        capacity=capacity, length=length, prioritized=prioritized, zero_state=zero_state, alpha=0.7
    )
    chunks = ChunkFolder(folder / "chunks") if how in ("chunks", "mapped") else None
    first = ReplayMemory(seed=1, path=folder / "first" if how == "mapped" else None, **options)
    fragments = stream(world, gaps, joined)
    for k, fragment in enumerate(fragments[:at]):
        first.add(fragment)
        used(first)
        if k % 3 == 0 and chunks is not None:
            first.get_state(chunks)  # so that the next state writes some chunks only
    if how == "tree":
        state = first.get_state()
        second = ReplayMemory(seed=2, **options)
        second.set_state(state)
    else:
        save(folder / "checkpoint", first, chunks)
        again = ChunkFolder(folder / "chunks") if chunks is not None else None
        second = load(
            folder / "checkpoint",
            again,
            seed=2,
            path=folder / "second" if how == "mapped" else None,
            **options,
        )
    assert contents(first) == contents(second)
    for fragment in fragments[at:]:
        first.add(fragment)
        second.add(fragment)
        assert_same(used(first), used(second))
    assert contents(first) == contents(second)
    if how == "tree":  # the state is still that of its moment
        third = ReplayMemory(seed=3, **options)
        fourth = ReplayMemory(seed=4, **options)
        for memory in (third, fourth):
            memory.set_state(state)
        assert_same(used(third), used(fourth))
    else:  # the next state after one that was loaded
        save(folder / "checkpoint", second, chunks and again)
        third = load(
            folder / "checkpoint",
            ChunkFolder(folder / "chunks") if chunks is not None else None,
            seed=5,
            **options,
        )
        assert contents(third) == contents(second)
        assert_same(used(third), used(second))


@settings(max_examples=30, deadline=None)
@given(fragments(), st.integers(25, 60), st.integers(1, 4), st.booleans())
def test_rich_fragments(fragment, capacity, n, prioritized):
    "Nested leaves, recurrent states of two layers, tuples, ends of all kinds."
    options = dict(capacity=capacity, length=fragment.n_steps, prioritized=prioritized)
    first = ReplayMemory(seed=1, **options)
    second = ReplayMemory(seed=2, **options)
    for _ in range(n):
        first.add(fragment)
    second.set_state(first.get_state())
    for _ in range(3):
        assert_same(used(first), used(second))
        for memory in (first, second):
            memory.add(fragment)
    assert contents(first) == contents(second)


def with_late_infos():
    "Fragments of which the third has an info first, and the fifth has it in another dtype; memory is allocated again for them."
    fragments = [f._replace(env={}) for f in collected("plain")[:6]]
    for k, dtype in ((2, torch.int32), (3, torch.int32), (4, torch.float64)):
        valid = fragments[k].valid
        late = torch.arange(valid.numel()).reshape(valid.shape).to(dtype)
        fragments[k] = fragments[k]._replace(env=dict(late=late, _late=valid))
    return fragments


# what arrives -> the fragments
ARRIVALS = {
    "one lane": lambda: collected("plain")[:5],
    "two lanes": lambda: stream("nested", (), False, 2),
    "joined lanes with a gap": lambda: stream("memory", (2,), True, 5),
    "late infos": with_late_infos,
}
# Without `zero_state`, segments begin where the recurrent state is known.
OPTIONS = [
    dict(zero_state=True),
    dict(zero_state=True, prioritized=True, alpha=0.7),
    dict(length=6, zero_state=True),
    dict(length=4, prioritized=True),
]


@pytest.mark.slow_but_one
@pytest.mark.parametrize("arrivals", ARRIVALS)
@pytest.mark.parametrize(
    "options, with_chunks", [*((x, False) for x in OPTIONS), (OPTIONS[3], True)], ids=str
)
def test_a_memory_goes_on_alike_from_its_state_at_any_item(
    small_chunks, tmp_path, arrivals, options, with_chunks
):
    "Also from the state of an empty memory; the ring of 30 steps wraps around."
    fragments = ARRIVALS[arrivals]()
    for k in range(len(fragments) + 1):
        chunks = ChunkFolder(tmp_path / str(k)) if with_chunks else None
        first = ReplayMemory(30, seed=1, **options)
        second = ReplayMemory(30, seed=2, **options)
        for i, f in enumerate(fragments[:k]):
            first.add(f)
            used(first)
            if i % 3 == 0:
                first.get_state(chunks)  # so that the next state writes some chunks only
        second.set_state(first.get_state(chunks), chunks)
        assert contents(first) == contents(second), f"after item {k}"

        for f in fragments[k:]:
            for memory in (first, second):
                memory.add(f)
            assert_same(used(first), used(second))
        assert contents(first) == contents(second), f"from item {k}"


def test_only_chunks_that_changed_are_written(small_chunks, tmp_path):
    chunks = ChunkFolder(tmp_path / "chunks")
    memory = ReplayMemory(1000, seed=0)
    fragments = collected("plain") * 5
    for f in fragments:
        memory.add(f)
    memory.get_state(chunks)
    n = len(chunks.names)
    known = set(chunks.names)
    memory.get_state(chunks)
    assert chunks.names == known and n > 100
    memory.add(fragments[0])
    state = memory.get_state(chunks)
    assert 0 < len(chunks.names - known) < 12
    used_size = sum(x is not None for x in state["rows"]["records"]["chunks"]) / len(
        state["rows"]["records"]["chunks"]
    )
    assert used_size < 0.6  # empty chunks have no file
    other = ChunkFolder(tmp_path / "other")  # a folder that has none of them gets them all
    memory.get_state(other)
    assert {x for rows in state["rows"].values() for x in rows["chunks"] if x} == other.names


def test_what_was_swept_away_is_written_again(small_chunks, tmp_path):
    "A state that came into no checkpoint names chunks that the next sweep removes."
    chunks = ChunkFolder(tmp_path / "chunks")
    memory = ReplayMemory(100, seed=0)
    for f in collected("plain")[:4]:
        memory.add(f)
    save_checkpoint(tmp_path / "checkpoint", Nobody(), {}, {})
    memory.get_state(chunks)
    chunks.sweep([tmp_path / "checkpoint"])
    assert list((tmp_path / "chunks").iterdir()) == []
    save(tmp_path / "checkpoint", memory, chunks)
    assert contents(
        load(tmp_path / "checkpoint", ChunkFolder(tmp_path / "chunks"), 100)
    ) == contents(memory)


@pytest.fixture
def saved(small_chunks, tmp_path):
    chunks = ChunkFolder(tmp_path / "chunks")
    memory = ReplayMemory(100, seed=0)
    for f in collected("plain")[:8]:
        memory.add(f)
    save(tmp_path / "checkpoint", memory, chunks)
    return tmp_path / "checkpoint", tmp_path / "chunks", sorted(chunks.names)


def refused(saved, *words, chunks=None, **options):
    with pytest.raises(CheckpointError) as e:
        load(saved[0], chunks or ChunkFolder(saved[1]), **dict(capacity=100) | options)
    assert all(str(word) in str(e.value) for word in words), str(e.value)


@pytest.mark.slow
def test_each_missing_or_damaged_chunk_is_named(saved):
    for name in saved[2]:
        file = saved[1] / name
        data = (saved[1] / name).read_bytes()
        file.unlink()
        refused(saved, file, "no such chunk")
        for wrong in (data[:-1], data + b"0", bytes([data[0] ^ 1]) + data[1:], b""):
            file.write_bytes(wrong)
            refused(saved, file, "damaged")
        file.write_bytes(data)
    load(saved[0], ChunkFolder(saved[1]), 100)


def test_chunks_of_another_training_are_refused(saved, tmp_path):
    memory = ReplayMemory(100, seed=0)
    others = ChunkFolder(tmp_path / "others")
    for f in collected("plain", lane=1)[:8]:
        memory.add(f)
    memory.get_state(others)
    for name, other in zip(saved[2], sorted(others.names)):
        (saved[1] / name).write_bytes((others.path / other).read_bytes())
    refused(saved, "another training")
    refused(saved, "no such chunk", others.path, chunks=others)


def test_states_of_other_memories_are_refused(saved, tmp_path):
    refused(saved, "another memory", "'capacity': 99", capacity=99)
    refused(saved, "another memory", prioritized=True)
    refused(saved, "another memory", length=2)
    with pytest.raises(
        CheckpointError, match="expected their `ChunkFolder`|Expected their `ChunkFolder`"
    ):
        ReplayMemory(100).set_state(load_checkpoint(saved[0]).pipes["memory"])
    state = load_checkpoint(saved[0]).pipes["memory"]
    rows = state["rows"]
    mixed = dict(state, rows=dict(rows, next=rows["records"] | dict(n=100)))
    with pytest.raises(CheckpointError, match="rows of another array"):
        ReplayMemory(100).set_state(mixed, ChunkFolder(saved[1]))


def test_a_sweep_keeps_what_any_checkpoint_names_and_removes_nothing_without_them(saved, tmp_path):
    path, folder, names = saved
    chunks = ChunkFolder(folder)
    memory = load(path, chunks, 100)
    (folder / ".0123456789abcdef.tmp").write_bytes(b"left")
    (folder / "notes.txt").write_text("mine")
    memory.add(collected("plain")[8])
    save_checkpoint(
        tmp_path / "newer", Nobody(), {}, {}, pipes=dict(memory=memory.get_state(chunks))
    )
    chunks.sweep([path, tmp_path / "newer"])
    assert contents(load(path, ChunkFolder(folder), 100)) != contents(
        load(tmp_path / "newer", ChunkFolder(folder), 100)
    )
    assert not (folder / ".0123456789abcdef.tmp").exists() and (folder / "notes.txt").exists()
    for wrong in (tmp_path / "none", folder / "notes.txt"):
        with pytest.raises(CheckpointError, match=str(wrong)):
            chunks.sweep([tmp_path / "newer", wrong])
    assert set(names) <= {file.name for file in folder.iterdir()}
    chunks.sweep([tmp_path / "newer"])
    load(tmp_path / "newer", ChunkFolder(folder), 100)
    refused(saved, "no such chunk")


@given(
    st.integers(1, 300),
    st.integers(1, 40),
    st.lists(st.lists(st.integers(0, 10_000), max_size=5), max_size=5),
    st.integers(0, 200),
)
@settings(max_examples=60, deadline=None)
def test_rows_that_change_and_grow(n, size, writes, more):
    rows = np.zeros(n, "i8")
    changes = RowChanges(np.zeros(n, "i8"))
    chunks = Kept()
    changes.size = size
    changes.changed = np.zeros(-(-n // size), bool)
    changes.names = [None] * -(-n // size)
    for k, index in enumerate(writes):
        index = np.array(index, int) % len(rows)
        rows[index] = k + 1
        changes.mark(index)
        if k == 2:
            changes.resize(len(rows), len(rows) + more)
            rows = np.append(rows, np.zeros(more, "i8"))
        state = changes.save(rows, chunks)
        again = np.zeros_like(rows)
        RowChanges(again).load(again, state, chunks)
        assert (again == rows).all()


class Kept:
    "A folder in memory."

    def __init__(self):
        self.names = set()
        self.data = {}

    def write(self, data):
        name = f"{len(self.data)}.chunk"
        self.names.add(name)
        self.data[name] = data.copy()
        return name

    def read(self, name):
        return self.data[name]


# --- a process that ends while it saves


def grown(memory, k, n):
    "The memory after the steps `k ... n - 1` of a training."
    known = stream("plain", (), True)
    for i in range(k, n):
        memory.add(known[i % len(known)]._replace(seq=torch.full((4,), i)))
        used(memory, 20)
    return memory


def made():
    return ReplayMemory(200, seed=0, prioritized=True, length=2)


def train(folder, n=10_000):
    "Go on from the checkpoint, and save after each step."
    chunks_module.CHUNK = 512
    folder = Path(folder)
    memory = made()
    begin = 0
    chunks = ChunkFolder(folder / "chunks")
    if (folder / "checkpoint").exists():
        found = load_checkpoint(folder / "checkpoint")
        memory.set_state(found.pipes["memory"], chunks)
        begin = found.counters["k"]
    print("ready", flush=True)
    for k in range(begin, n):
        grown(memory, k, k + 1)
        save(folder / "checkpoint", memory, chunks, dict(k=k + 1))


def started(folder):
    process = Forked(
        ["-c", f"import test_replay_state as t; t.train({str(folder)!r})"],
        cwd=Path(__file__).parent,
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.slow
def test_a_kill_at_any_instant_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks_module, "CHUNK", 512)
    rng = random.Random(0)
    before = 0
    twin = made()
    rounds = 0
    while rounds < 6 or before < 2:
        rounds += 1  # Each round may last longer: a busy machine saves in one of them.
        with started(tmp_path):
            time.sleep(0.05 + rng.random() * 0.1 * rounds)  # its end is a kill
        if not (tmp_path / "checkpoint").exists():
            continue
        found = load_checkpoint(tmp_path / "checkpoint")
        memory = made()
        memory.set_state(found.pipes["memory"], ChunkFolder(tmp_path / "chunks"))
        k = found.counters["k"]
        grown(twin, before, k)
        assert k >= before and contents(memory) == contents(twin)
        before = k
    chunks = ChunkFolder(tmp_path / "chunks")
    chunks.sweep([tmp_path / "checkpoint"])
    saved = load_checkpoint(tmp_path / "checkpoint").pipes["memory"]
    assert {file.name for file in chunks.path.iterdir()} == {
        x for rows in saved["rows"].values() for x in rows["chunks"] if x
    }


def failing_after(n, known):
    "A function that works `n` times, and then finds the disk full."
    calls = iter(range(n))

    def function(*args, **kwargs):
        if next(calls, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return known(*args, **kwargs)

    return function


def whole(folder):
    return contents(
        load(folder / "checkpoint", ChunkFolder(folder / "chunks"), 200, prioritized=True, length=2)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["os.fsync", "os.replace", "builtins.open"])
def test_an_error_at_any_moment_leaves_the_old_state_and_the_next_save_works(
    small_chunks, tmp_path, monkeypatch, name
):
    "Some of these errors come while a chunk is written, and the later ones while the checkpoint is."
    chunks = ChunkFolder(tmp_path / "chunks")
    memory = made()
    failed = 0
    grown(memory, 0, 20)
    save(tmp_path / "checkpoint", memory, chunks)
    old = contents(memory)
    for n in range(0, 60, 3):
        memory.prioritize([memory.store.ring.oldest + 20 + n], [float(n)])
        with monkeypatch.context() as m:
            m.setattr(
                name,
                failing_after(
                    n, {"os.fsync": os.fsync, "os.replace": os.replace, "builtins.open": open}[name]
                ),
            )
            try:
                save_checkpoint(
                    tmp_path / "checkpoint",
                    Nobody(),
                    {},
                    {},
                    pipes=dict(memory=memory.get_state(chunks)),
                )
            except OSError as e:
                failed += e.errno == errno.ENOSPC
            else:
                old = contents(memory)
        assert whole(tmp_path) == old
    assert failed
    save(tmp_path / "checkpoint", memory, chunks)
    assert whole(tmp_path) == contents(memory)


def too_large(folder):
    "Save with a limit of the size of files below that of a chunk, and then without one."
    chunks_module.CHUNK = 512
    folder = Path(folder)
    memory = made()
    chunks = ChunkFolder(folder / "chunks")
    grown(memory, 0, 3)
    save(folder / "checkpoint", memory, chunks, dict(k=3))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    grown(memory, 3, 9)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, limits[1]))
    try:
        save(folder / "checkpoint", memory, chunks, dict(k=9))
    except OSError as e:
        print(e.errno == errno.EFBIG, str(folder / "chunks") in str(e))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    found = load_checkpoint(folder / "checkpoint")
    old = made()
    old.set_state(found.pipes["memory"], ChunkFolder(folder / "chunks"))
    print(
        found.counters["k"],
        contents(old) == contents(grown(made(), 0, 3)),
        list((folder / "chunks").glob(".*")),
    )
    save(folder / "checkpoint", memory, chunks, dict(k=9))
    print(
        contents(
            load(
                folder / "checkpoint",
                ChunkFolder(folder / "chunks"),
                200,
                prioritized=True,
                length=2,
            )
        )
        == contents(memory)
    )


def test_a_full_disk_leaves_the_old_state(tmp_path):
    ended = run_forked(
        ["-c", f"import test_replay_state as t; t.too_large({str(tmp_path)!r})"],
        cwd=Path(__file__).parent,
    )
    assert ended.stdout == "True True\n3 True []\nTrue\n", ended.stderr
