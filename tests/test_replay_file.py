"The file of a mapped replay: all of it is on the disk before the first step is stored, or there is an error and no file."
import errno
import os
import subprocess
import sys
from itertools import islice
from types import SimpleNamespace

import pytest
from toys import Counting, Plain

from rollpipe.pipes import DataError, EnvStepper, FragmentCollector, ReplayMemory, replayed
from rollpipe.pipes.replay import store

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
    command = [sys.executable, "-c", FILL, str(folder), str(capacity), str(limit)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, (ended.returncode, ended.stderr)
    return ended.stdout


@pytest.fixture
def small_disk(tmp_path):
    "A file system of one megabyte."
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def fragment(): return next(iter(FragmentCollector(EnvStepper(Counting, Plain(), 2, seed=0), 4)))


def refused(*words, folder, capacity=1000):
    with pytest.raises(DataError) as e: ReplayMemory(capacity, path=folder).add(fragment())
    assert all(str(word) in str(e.value) for word in words), str(e.value)
    assert list(folder.iterdir()) == []


def test_a_full_disk_is_an_error_and_leaves_no_file(small_disk):
    message = filled(small_disk, 100_000)
    for words in (f"{small_disk}/steps.npy", "Expected 15,200,000 bytes for capacity=100,000", "`path`", "got 1,048,576 free bytes"):
        assert words in message
    assert list(small_disk.iterdir()) == []


def test_a_file_that_must_not_grow_so_large(tmp_path):
    message = filled(tmp_path, 100_000, limit=1 << 20)
    assert all(word in message for word in (f"{tmp_path}/steps.npy", "capacity=100,000", "File too large"))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_others_fill_in_the_same_moment(tmp_path, monkeypatch):
    def full(*args): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    refused(tmp_path / "steps.npy", "capacity=1,000", "No space left on device", folder=tmp_path)


@pytest.mark.parametrize("harm", ["missing", errno.EOPNOTSUPP, errno.EINVAL])
def test_systems_that_cannot_allocate_get_a_file_full_of_zeros(tmp_path, monkeypatch, harm):
    def fails(*args): raise OSError(harm, os.strerror(harm))
    if harm == "missing": monkeypatch.delattr(os, "posix_fallocate")
    else: monkeypatch.setattr(os, "posix_fallocate", fails)
    test_the_whole_file_is_on_the_disk(tmp_path)


def test_the_whole_file_is_on_the_disk(tmp_path):
    memory, other = ReplayMemory(200_000, path=tmp_path, seed=0), ReplayMemory(200_000, seed=0)
    memory.add(fragment())
    other.add(fragment())
    file = os.stat(tmp_path / "steps.npy")
    assert file.st_size > memory.store.records.nbytes and file.st_blocks * 512 >= file.st_size
    assert memory.store.records.tobytes() == other.store.records.tobytes()


def test_a_disk_without_room_is_refused_before_it_is_filled(tmp_path, monkeypatch):
    monkeypatch.setattr(store.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: pytest.fail("the disk was filled"), raising=False)
    refused("got 10 free bytes", folder=tmp_path)


def test_a_file_that_the_last_run_left_makes_room_for_the_new_one(small_disk):
    for _ in range(2):
        memory = ReplayMemory(5_000, path=small_disk)
        memory.add(fragment())
        assert memory.store.records.nbytes > 1 << 19
        del memory


def test_the_recipe_passes_the_error_on(tmp_path, monkeypatch):
    monkeypatch.setattr(store.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
    with pytest.raises(DataError, match="ReplayMemory: .*steps.npy"):
        list(islice(replayed(Counting, Plain(), capacity=100, warmup=0, path=tmp_path), 1))
