"Sums through shared memory are those of the numbers in the order of the ranks, whatever their sizes, and however late a rank reads."

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from threading import Barrier

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpipe.ranks.collectives import SharedSums, shared_sums

DTYPES = torch.float32, torch.float64, torch.int64, torch.bfloat16


def in_ranks(n, task, change=lambda rank, x: x):
    "What `task(sums, rank)` returns in `n` threads, each with the `SharedSums` of a rank; `change` what a rank says of itself."
    table = [None] * n
    meeting = Barrier(n)

    def one(rank):
        def gathered(x):
            table[rank] = change(rank, x)
            meeting.wait(20)
            found = list(table)
            meeting.wait(20)
            return found

        sums = shared_sums(rank, gathered, timeout=20)
        try:
            return task(sums, rank)
        finally:
            meeting.wait(20)  # nobody closes a connection that another still reads
            if sums is not None:
                sums.close()

    with ThreadPoolExecutor(n) as threads:
        return list(threads.map(one, range(n)))


def numbers(shape, dtype, *seed):
    return (1000 * torch.randn(shape, generator=torch.Generator().manual_seed(hash(seed)))).to(
        dtype
    )


@settings(deadline=None, max_examples=30)
@given(
    st.integers(2, 4),
    st.lists(
        st.tuples(st.lists(st.integers(0, 20), max_size=3), st.sampled_from(DTYPES)),
        min_size=1,
        max_size=8,
    ),
)
def test_any_sequence_of_sums(n, wanted):
    def task(sums, rank):
        found = [numbers(shape, dtype, k, rank) for k, (shape, dtype) in enumerate(wanted)]
        for x in found:
            sums(x)
        return found

    for found in in_ranks(n, task):
        for k, (shape, dtype) in enumerate(wanted):
            assert found[k].equal(
                reduce(torch.add, [numbers(shape, dtype, k, rank) for rank in range(n)])
            )


def test_a_rank_may_read_late_while_another_begins_a_larger_sum(monkeypatch):
    "Rank 1 reads after the others have written the numbers of their next sum, and have made their memory larger."
    plain = SharedSums._exchange
    sizes = (3, 3, 5000, 2, 100_000, 100_000, 7)

    def late(sums, message):
        plain(sums, message)
        if sums.rank == 1:
            time.sleep(0.1)

    monkeypatch.setattr(SharedSums, "_exchange", late)

    def task(sums, rank):
        found = [torch.full((n,), 10.0**rank + k) for k, n in enumerate(sizes)]
        for x in found:
            sums(x)
        return found

    for found in in_ranks(3, task):
        for k, (n, x) in enumerate(zip(sizes, found)):
            assert x.equal(torch.full((n,), 111.0 + 3 * k))


def test_no_sum_follows_one_that_failed(monkeypatch):
    "The message of rank 1 for its first sum comes late, and is of as many bytes as that of the second one."

    def task(sums, rank):
        if rank:
            time.sleep(0.5)
        else:
            sums.timeout = 0.1
        for _ in range(2):
            with pytest.raises(RuntimeError):
                sums(torch.ones(2))

    in_ranks(2, task)


def test_an_interrupted_sum_is_the_last(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    def task(sums, rank):
        if not rank:
            monkeypatch.setattr(sums, "_exchange", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sums(torch.ones(2))
            monkeypatch.undo()
        with pytest.raises(RuntimeError, match="Connection"):
            sums(torch.ones(2))

    in_ranks(2, task)


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = len(os.listdir("/dev/fd"))
    in_ranks(3, lambda sums, rank: sums(torch.ones(10_000)))
    assert not os.listdir(tmp_path) and len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize("what", ["elsewhere", "no sockets", "a long name", "no folder"])
def test_ranks_that_cannot_reach_each_other_know_it_and_leave_nothing(what, tmp_path, monkeypatch):
    if what == "a long name":
        (tmp_path / ("x" * 120)).mkdir()
    place = {"a long name": tmp_path / ("x" * 120), "no folder": tmp_path / "missing"}.get(
        what, tmp_path
    )
    monkeypatch.setattr(tempfile, "tempdir", str(place))

    def change(rank, x):
        if rank or not isinstance(x, str):
            return x
        return None if what == "no sockets" else "/nowhere/sums" if what == "elsewhere" else x

    before = len(os.listdir("/dev/fd"))
    assert in_ranks(3, lambda sums, rank: sums, change) == [None] * 3
    assert len(os.listdir("/dev/fd")) == before and all(
        not files for _, _, files in os.walk(tmp_path)
    )
