"""The file of a mapped replay: all of it is on the disk before the first step is stored, or there is an error and no file; and one memory
at a time has it, whoever else asks for it."""

import copy
import errno
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forked import Forked, run_forked
from toys import Counting, Plain

from rollpipe.pipes import (
    DataError,
    DataLoader2,
    EnvStepper,
    FragmentCollector,
    ProcessReading,
    ReplayMemory,
    replayed,
)
from rollpipe.pipes.graph.edits import find_one
from rollpipe.pipes.replay.pipe import Replay

FILL = """
import resource, sys
sys.path.insert(0, 'tests')
from toys import Counting, Plain
from rollpipe.pipes import DataError, replayed
folder, capacity, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    for k, item in enumerate(replayed(Counting, Plain(), n_envs=50, n_steps=100, capacity=capacity, warmup=0, seed=0, path=folder)):
        if k == 30: sys.exit('no error')
except DataError as e: print(e)
"""


def filled(folder, capacity, limit=0):
    "What a process prints that fills a replay in `folder`; a bus error would end it."
    ended = run_forked(["-c", FILL, folder, capacity, limit])
    assert ended.returncode == 0, (ended.returncode, ended.stderr)
    return ended.stdout


@pytest.fixture
def small_disk(tmp_path):
    "A file system of one megabyte."
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True
    ).returncode:
        pytest.skip("no file system can be mounted here")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def fragment():
    return next(iter(FragmentCollector(EnvStepper(Counting, Plain(), 2, seed=0), 4)))


def refused(*words, folder, capacity=1000):
    with pytest.raises(DataError) as e:
        ReplayMemory(capacity, path=folder).add(fragment())
    assert all(str(word) in str(e.value) for word in words), str(e.value)
    assert list(folder.iterdir()) == []


def test_a_full_disk_is_an_error_and_leaves_no_file(small_disk):
    message = filled(small_disk, 100_000)
    for words in (
        f"{small_disk}/steps.npy",
        "Expected 15,200,000 bytes for capacity=100,000",
        "`path`",
        "got 1,048,576 free bytes",
    ):
        assert words in message
    assert list(small_disk.iterdir()) == []


def test_a_file_that_must_not_grow_so_large(tmp_path):
    message = filled(tmp_path, 100_000, limit=1 << 20)
    assert all(
        word in message for word in (f"{tmp_path}/steps.npy", "capacity=100,000", "File too large")
    )
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_others_fill_in_the_same_moment(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    refused(tmp_path / "steps.npy", "capacity=1,000", "No space left on device", folder=tmp_path)


@pytest.mark.parametrize("harm", ["missing", errno.EOPNOTSUPP, errno.EINVAL])
def test_systems_that_cannot_allocate_get_a_file_full_of_zeros(tmp_path, monkeypatch, harm):
    def fails(*args):
        raise OSError(harm, os.strerror(harm))

    if harm == "missing":
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        monkeypatch.setattr(os, "posix_fallocate", fails)
    test_the_whole_file_is_on_the_disk(tmp_path)


def test_the_whole_file_is_on_the_disk(tmp_path):
    memory = ReplayMemory(200_000, path=tmp_path, seed=0)
    other = ReplayMemory(200_000, seed=0)
    memory.add(fragment())
    other.add(fragment())
    file = os.stat(tmp_path / "steps.npy")
    assert file.st_size > memory.store.records.nbytes and file.st_blocks * 512 >= file.st_size
    assert memory.store.records.tobytes() == other.store.records.tobytes()


def test_a_disk_without_room_is_refused_before_it_is_filled(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
    monkeypatch.setattr(
        os, "posix_fallocate", lambda *args: pytest.fail("the disk was filled"), raising=False
    )
    refused("got 10 free bytes", folder=tmp_path)


def test_a_file_that_the_last_run_left_makes_room_for_the_new_one(small_disk):
    for _ in range(2):
        memory = ReplayMemory(5_000, path=small_disk)
        memory.add(fragment())
        assert memory.store.records.nbytes > 1 << 19
        del memory


def test_a_file_that_no_memory_has_made_stays(tmp_path):
    np.save(tmp_path / "steps.npy", np.arange(3))
    memory = ReplayMemory(100, path=tmp_path)
    with pytest.raises(DataError, match=r"steps.npy may be yours: .*Expected another folder"):
        memory.add(fragment())
    del memory
    assert np.load(tmp_path / "steps.npy").tolist() == [0, 1, 2]
    (tmp_path / "steps.npy").write_bytes(b"")  # a memory that was killed while it made its file
    ReplayMemory(100, path=tmp_path).add(fragment())


def test_the_recipe_passes_the_error_on(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
    with pytest.raises(DataError, match="ReplayMemory: .*steps.npy"):
        list(islice(replayed(Counting, Plain(), capacity=100, warmup=0, path=tmp_path), 1))


# --- one memory at a time


def filled_memory(folder, x=1.0):
    "A memory whose rewards are all `x`."
    memory = ReplayMemory(100, path=folder, seed=0)
    example = fragment()
    memory.add(
        example._replace(state=example.state._replace(rew=torch.full_like(example.state.rew, x)))
    )
    return memory


def rewards(memory):
    return set(memory.sample(50).fragment.state.rew[1:].flatten().tolist())


def is_refused(folder):
    try:
        filled_memory(folder)
    except DataError as e:
        return (
            f"{folder}/steps.npy is in use by another memory. Expected a folder of its own (`path`)"
            in str(e)
        )
    return False


def compete(folder, x, barrier, found):
    try:
        barrier.wait(60)
        memory = filled_memory(folder, x)
        barrier.wait(60)  # both have begun
        found.put(("has", rewards(memory) == {x}))
    except DataError as e:
        barrier.wait(60)
        found.put(("refused", f"{folder}/steps.npy is in use" in str(e)))
    barrier.wait(60)


def in_process(function, *args):
    "The result of a function in a forked process."
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply_async(function, args).get(60)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_of_two_processes_that_begin_together_one_has_the_file(tmp_path):
    "Also if an earlier one has left a file, and however the folder is spelled."
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    names = [
        tmp_path / "folder",
        tmp_path / "link",
        os.path.relpath(tmp_path / "folder"),
        f"{tmp_path}/link/../folder",
    ]
    fork = multiprocessing.get_context("fork")
    for k in range(24):
        if k % 3 == 0:
            (tmp_path / "folder" / "steps.npy").unlink(missing_ok=True)
        barrier = fork.Barrier(2)
        found = fork.SimpleQueue()
        both = [
            fork.Process(target=compete, args=(names[j], j + 1.0, barrier, found))
            for j in (0, k % 4)
        ]
        for process in both:
            process.start()
        told = sorted(found.get() for _ in both)
        for process in both:
            process.join(60)
        assert told == [("has", True), ("refused", True)], k


def test_a_second_memory_in_one_process_is_refused_until_the_first_ends(tmp_path):
    first = filled_memory(tmp_path, 1.0)
    assert is_refused(tmp_path) and is_refused(tmp_path) and in_process(is_refused, tmp_path)
    first.close()
    second = filled_memory(tmp_path, 2.0)  # in a file that replaces the other one, which goes on
    first.add(fragment())
    assert rewards(second) == {2.0} and in_process(is_refused, tmp_path)
    del second
    filled_memory(tmp_path)


def test_a_memory_that_grows_keeps_its_file(tmp_path):
    memory = filled_memory(tmp_path, 1.0)
    more = fragment()
    memory.add(more._replace(env={"new": more.state.rew[1:] * 0.0}))
    assert (
        (tmp_path / "steps.npy").exists()
        and is_refused(tmp_path)
        and "new" in memory.sample(1).fragment.env
    )
    memory.close()
    other = filled_memory(tmp_path)
    with pytest.raises(DataError, match="in use by another memory"):
        memory.add(more._replace(env={"newer": more.state.rew[1:]}))
    assert rewards(other) == {1.0} and rewards(memory)


def test_a_disk_without_room_leaves_the_folder_free(tmp_path, monkeypatch):
    with monkeypatch.context() as m:
        m.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
        with pytest.raises(DataError, match="no room"):
            filled_memory(tmp_path)
    filled_memory(tmp_path)


def adds(memory):
    try:
        memory.add(fragment())
    except DataError as e:
        return "is in use by another process" in str(e) and len(memory)
    return "added"


def test_a_forked_process_neither_writes_into_the_file_nor_frees_it(tmp_path):
    memory = filled_memory(tmp_path, 3.0)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(
        target=lambda: theirs.send((adds(memory), is_refused(tmp_path), memory.close()))
    )
    process.start()
    assert ours.poll(60) and ours.recv() == (8, True, None)
    process.join(60)
    assert rewards(memory) == {3.0} and in_process(is_refused, tmp_path)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda memory: pickle.loads(pickle.dumps(memory))]
)
@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_copy_of_a_memory_has_steps_of_its_own(tmp_path, copied, is_mapped):
    memory = filled_memory(tmp_path if is_mapped else None, 3.0)
    other = copied(memory)
    other.store.records["fragment.state.rew"] = 5.0
    assert rewards(memory) == {3.0} and 5.0 in rewards(other)
    other.close()
    del other
    assert is_refused(tmp_path) == is_mapped


ORPHAN = """
import os, signal, sys, time
sys.path.insert(0, "tests")
from test_replay_file import filled_memory
memory, (read, write) = filled_memory(sys.argv[1]), os.pipe()
if not (child := os.fork()):
    os.write(write, b".")
    time.sleep(60)
    os._exit(0)
os.read(read, 1)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_file_of_a_killed_process_is_taken_while_a_fork_of_it_lives(tmp_path):
    with Forked(["-c", ORPHAN, tmp_path]) as killed:
        orphan = int(killed.stdout.readline())
        assert killed.wait(60) == -signal.SIGKILL
        try:
            assert (tmp_path / "steps.npy").exists() and rewards(filled_memory(tmp_path, 2.0)) == {
                2.0
            }
        finally:
            os.kill(orphan, signal.SIGKILL)


def pipeline(folder, **options):
    return replayed(
        Counting,
        Plain(),
        **{**dict(n_envs=2, n_steps=4, capacity=100, warmup=0, seed=0, path=folder), **options},
    )


def test_one_iterator_after_another_of_the_same_pipeline(tmp_path):
    pipe = pipeline(tmp_path)
    first = iter(pipe)
    item = next(first)
    again = iter(
        pipe
    )  # the first one is not valid any more, but it is still there, with its memory
    assert len(next(again).memory) == len(item.memory) == 8
    assert np.shares_memory(item.memory.store.records, next(again).memory.store.records) is False
    assert is_refused(tmp_path)
    again.close()
    for _ in range(2):
        item = next(iter(pipe))
    filled_memory(tmp_path)


@pytest.mark.parametrize("workers", [0, 2])
def test_one_loader_after_another(tmp_path, workers):
    "The copies of the graph that the loaders make have a memory each, one after another."
    pipe = pipeline(tmp_path, lanes=2)
    for _ in range(2):
        with DataLoader2(
            pipe, reading_service=ProcessReading(workers) if workers else None
        ) as loader:
            for _ in range(2):
                sizes = [len(item.memory) for item in islice(loader, 3)]
            assert sizes == [16, 32, 48] and is_refused(tmp_path)
    filled_memory(tmp_path)


def test_two_copies_of_a_pipeline_at_the_same_time(tmp_path):
    pipe = pipeline(tmp_path)
    items = iter(pipe)
    next(items)
    with pytest.raises(
        DataError, match=f"Replay.*{tmp_path}/steps.npy is in use by another memory"
    ):
        next(iter(copy.deepcopy(pipe)))
    assert find_one(pipe, Replay).path == tmp_path and len(next(items).memory) == 16
