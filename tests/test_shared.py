"Memory without a name: it grows for all who have it, and vanishes with them."

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_cases import descriptors

from rollpipe.pipes import DataError
from rollpipe.pipes.workers.codec import SharedMemory, available_memory

fork = multiprocessing.get_context("fork")


def maps():
    return Path("/proc/self/maps").read_text().count("rollpipe")


@settings(deadline=None, max_examples=25)
@given(sizes=st.lists(st.integers(0, 50_000), min_size=1, max_size=6))
def test_what_is_there_stays_and_what_is_new_is_zero(sizes):
    "Against a plain array that is made longer. Older views stay views of the same memory."
    shared = SharedMemory()
    plain = np.zeros(0, np.uint8)
    views = []
    for k, size in enumerate(sizes):
        shared.reserve(size)
        plain = np.concatenate([plain, np.zeros(max(0, size - len(plain)), np.uint8)])
        view = shared.view()
        assert view.dtype == np.uint8 and np.array_equal(view, plain) and shared.size == len(plain)
        plain[k::3] = view[k::3] = k + 1
        views.append(view)
    for view in views:
        assert np.array_equal(view, plain[: len(view)])
    shared.close()
    for view in views:
        assert np.array_equal(view, plain[: len(view)])


def grow(shared, link):
    "In another process: make it as large as told, fill what is new, answer with the size."
    while (message := link.recv()) is not None:
        size, value = message
        before = shared.size
        shared.reserve(size)
        shared.view()[before:size] = value
        link.send(shared.size)


def test_several_processes_let_it_grow():
    shared = SharedMemory(100)
    workers = []
    for _ in range(2):
        ours, theirs = fork.Pipe()
        process = fork.Process(target=grow, args=(shared, theirs))
        process.start()
        workers.append((process, ours))
    shared.view()[:] = 9
    for k, size in enumerate((5000, 70_000, 70_001, 400_000)):
        link = workers[k % 2][1]
        link.send((size, k))
        told = link.recv()
        assert told == size
        # what a worker has not heard of yet, it does not fill
        assert (
            (shared.view(told)[-1:] == k).all()
            and len(shared.view()) == size
            and (shared.view()[:100] == 9).all()
        )
    for process, link in workers:
        link.send(None)
        process.join()
        assert process.exitcode == 0


def test_what_has_grown_elsewhere_is_not_made_smaller():
    "By somebody who knows only what it was, and wants less than there is."
    shared = SharedMemory(1000)

    def child():
        shared.reserve(50_000)
        shared.view()[-1] = 7

    process = fork.Process(target=child)
    process.start()
    process.join()
    shared.reserve(2000)
    assert shared.size == 50_000 and shared.view()[-1] == 7


def test_it_is_let_go_of():
    "Descriptors and mappings; also what is no longer the newest mapping."
    before = descriptors()
    mapped = maps()
    for _ in range(20):
        shared = SharedMemory(10)
        for size in (5000, 100_000, 10**6):
            shared.reserve(size)
        view = shared.view()
        shared.close()
        assert len(view) == 10**6
    del view, shared
    assert descriptors() <= before and maps() == mapped


def test_it_has_no_name_and_is_not_inherited_by_other_programs():
    shared = SharedMemory(10**6)
    assert not list(Path("/dev/shm").glob("*rollpipe*"))
    code = (
        "import os; print(sum('rollpipe' in os.readlink(f'/proc/self/fd/{k}') for k in os.listdir('/proc/self/fd') if os.path.exists("
        "f'/proc/self/fd/{k}')))"
    )
    out = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        close_fds=False,
    ).stdout
    assert out.strip() == "0"
    shared.close()


def test_it_takes_memory_at_once():
    "So that there is an error here, rather than the end of the process when it is used."
    shared = SharedMemory(10**6)
    assert os.fstat(shared.fd).st_blocks * 512 >= 10**6
    shared.close()


def test_too_much():
    shared = SharedMemory(1000)
    shared.view()[:] = 5
    for size in (2**50, 2**62):
        with pytest.raises(
            DataError,
            match=rf"not enough memory to share between processes. Expected {size - 1000:,} more bytes",
        ):
            shared.reserve(size)
        assert (
            shared.size == 1000
            and (shared.view() == 5).all()
            and os.fstat(shared.fd).st_size == 1000
        )
    shared.reserve(2000)
    assert len(shared.view()) == 2000
    before = descriptors()
    with pytest.raises(DataError):
        SharedMemory(2**50)
    assert descriptors() == before


def test_available():
    assert 2**20 < available_memory() < 2**62
