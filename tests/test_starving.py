"A pipe that reads on and on and yields nothing is named in the log, once."

import logging
from itertools import count, islice

import pytest
from toys import Counting, Plain

from rollpipe.pipes import (
    EnvStepper,
    EpisodeCollector,
    FragmentCollector,
    FragmentStacker,
    Lanes,
    Pipe,
    ProcessReading,
)
from rollpipe.pipes.graph import pipe as pipe_module
from rollpipe.pipes.graph.pipe import Source
from rollpipe.pipes.graph.torchdata import DataLoader2, IterableWrapper


class DropsAll(Pipe):
    def __init__(self, pipe, n=None):
        super().__init__(pipe)
        self.n = n

    def stream(self, items):
        for k, item in enumerate(items):
            if self.n is not None and k >= self.n:
                yield item


class Numbers(Source):
    def __init__(self, n):
        self.n = n

    def stream(self, items):
        yield from range(self.n)


class Same(Pipe):
    reads = 1

    def stream(self, items):
        yield from items


@pytest.fixture(autouse=True)
def impatient(monkeypatch, caplog):
    monkeypatch.setattr(pipe_module, "PATIENCE", (256, 0, 1e9))
    caplog.set_level(logging.WARNING, "rollpipe")


def told(caplog):
    return [r.getMessage() for r in caplog.records]


def nothing(x):
    return False


def late(x):
    return x >= 200


def test_a_pipe_that_drops_everything(caplog):
    assert list(DropsAll(Same(Numbers(5000)))) == []
    assert len(told(caplog)) == 1
    assert "DropsAll has read 256 items" in told(caplog)[0] and "yielded none" in told(caplog)[0]


@pytest.mark.parametrize("make", [lambda p: p, Same, lambda p: Same(Same(p))])
@pytest.mark.parametrize("source", [Numbers, lambda n: IterableWrapper(range(n))])
def test_it_is_the_pipe_that_is_named_not_its_neighbours(make, source, caplog):
    assert list(make(DropsAll(make(Same(source(3000)))))) == []
    assert len(told(caplog)) == 1 and "DropsAll has read 256 items" in told(caplog)[0]


@pytest.mark.parametrize("make", [lambda p: p, lambda p: p.map(abs)])
def test_a_filter_of_torch_is_named_by_the_pipe_that_reads_it(make, caplog):
    assert list(Same(make(Same(Numbers(3000)).filter(nothing)))) == []
    assert len(told(caplog)) == 1 and "Filter" in told(caplog)[0] and "256 items" in told(caplog)[0]


@pytest.mark.parametrize("make", [Lanes, lambda p: FragmentStacker(Lanes(p), 1)])
def test_a_filter_above_the_lanes(make, caplog):
    assert list(make(Same(Numbers(3000)).filter(nothing))) == []
    assert len(told(caplog)) == 1 and "FilterIterDataPipe has read 256 items" in told(caplog)[0]


def test_a_filter_below_the_lanes(caplog):
    assert list(Same(Lanes(Same(Numbers(3000)), 2).filter(nothing))) == []
    assert len(told(caplog)) == 1 and "FilterIterDataPipe has read 256 items" in told(caplog)[0]


def test_episodes_that_never_end(caplog):
    pipe = EpisodeCollector(
        EnvStepper(lambda: Counting([(10**9, "term")]), Plain(), 1, seed=0, info_keys=()), 1
    )
    stream = iter(pipe)
    pipe.pipe.stream = lambda items: islice(type(pipe.pipe).stream(pipe.pipe, items), 600)
    assert list(stream) == []
    assert len(told(caplog)) == 1 and "EpisodeCollector has read 256 items" in told(caplog)[0]


@pytest.mark.parametrize("make", [DropsAll, lambda p: p.filter(nothing)])
def test_in_a_worker_the_log_says_so(make, tmp_path):
    logging.getLogger("rollpipe").addHandler(handler := logging.FileHandler(tmp_path / "log"))
    try:
        with DataLoader2(
            Lanes(make(Numbers(3000))), reading_service=ProcessReading(1, start_method="fork")
        ) as loader:
            assert list(loader) == []
    finally:
        logging.getLogger("rollpipe").removeHandler(handler)
        handler.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 1 and "has read 256 items" in lines[0]


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "pipe, n",
    [
        (DropsAll(Numbers(5000), 200), 4800),
        (Same(Numbers(5000).filter(late)), 4800),
        (Lanes(Numbers(5000).filter(late), 2), 9600),
        (DropsAll(Numbers(200)), 0),
        (Same(Numbers(200).filter(nothing)), 0),
        (Same(IterableWrapper(range(5000))), 5000),
    ],
)
def test_others_are_left_alone(pipe, n, caplog):
    for _ in range(2):
        assert len(list(pipe)) == n
    assert told(caplog) == []


def test_a_long_fragment_is_no_starvation(caplog):
    pipe = FragmentCollector(EnvStepper(Counting, Plain(), 1, seed=0, info_keys=()), 2000)
    assert next(iter(pipe)).n_steps == 2000 and told(caplog) == []


def test_seconds_count_too(caplog, monkeypatch):
    clock = count(0, 7)
    monkeypatch.setattr(pipe_module, "PATIENCE", (10**6, 100, 30))
    monkeypatch.setattr(pipe_module, "monotonic", lambda: next(clock))
    assert list(DropsAll(Numbers(5000))) == []
    assert len(told(caplog)) == 1 and "DropsAll has read 128 items in 63 seconds" in told(caplog)[0]


def test_streams_are_closed_at_once_wherever_they_stop():
    closed = []

    class Closing(Pipe):
        def stream(self, items):
            try:
                yield from items
            finally:
                closed.append(self)

    for n in (1, 2, 300):
        pipe = Closing(Closing(Closing(Numbers(5000)).filter(bool)))
        stream = iter(pipe)
        for _ in range(n):
            next(stream)
        stream.close()
        assert closed[:2] == [pipe, pipe.pipe] and len(closed) == 3
        closed.clear()
