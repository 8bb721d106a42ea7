"Worker processes at their borders: slow closing, long queues, helpers that outlive a worker, groups, late weights."

import os
import signal
import subprocess
import sys
import time
from itertools import islice

import pytest
import torch
from reference import assert_same, snapshot
from toys import Counting, Learning, Lively, Plain, Shaky

from rollpipe.pipes import (
    DataLoader2,
    EnvStepper,
    FragmentCollector,
    FragmentStacker,
    Lanes,
    Minibatcher,
    ProcessReading,
    WorkerError,
)
from rollpipe.pipes.graph.modules import bump_version, modules_in
from rollpipe.pipes.graph.torchdata import InProcessReadingService, IterableWrapper
from rollpipe.pipes.workers.channel import WeightPublisher


def fragments(env=Counting, actor=None, n_steps=2, **kwargs):
    return FragmentCollector(EnvStepper(env, actor or Plain(), **kwargs), n_steps)


class SlowClose(Counting):
    "Needs 0.8 s to close, and writes down that it was done."

    folder = None

    def close(self):
        time.sleep(0.8)
        (self.folder / str(os.getpid())).write_text("closed")


@pytest.mark.parametrize("lag", [0, 1])
def test_environments_have_the_time_to_close(lag, tmp_path, monkeypatch):
    monkeypatch.setattr(SlowClose, "folder", tmp_path)
    with DataLoader2(
        Lanes(fragments(SlowClose), 2, 0), reading_service=ProcessReading(2, lag=lag)
    ) as loader:
        for _ in islice(loader, 3):
            pass
    assert len(list(tmp_path.iterdir())) == 2


def test_environments_that_do_not_close_are_not_waited_for_longer_than_grace(tmp_path, monkeypatch):
    monkeypatch.setattr(SlowClose, "folder", tmp_path)
    with DataLoader2(fragments(SlowClose), reading_service=ProcessReading(1, grace=0.1)) as loader:
        for _ in islice(loader, 1):
            pass
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_hundreds_of_requests_for_one_worker():
    "More than a connection holds while nobody reads it."
    with DataLoader2(
        fragments(), reading_service=ProcessReading(1, lag=None, n_buffers=450)
    ) as loader:
        assert [int(f.seq[0]) for f in islice(loader, 600)] == list(range(600))


class WithHelper(Counting):
    "Starts a process that inherits all descriptors and outlives it."

    file = None

    def __init__(self):
        super().__init__()
        self.file.write_text(
            str(
                subprocess.Popen(
                    [sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False
                ).pid
            )
        )


def test_a_death_is_noticed_though_a_helper_holds_the_connection(tmp_path, monkeypatch):
    monkeypatch.setattr(WithHelper, "file", tmp_path / "pid")
    try:
        with DataLoader2(fragments(WithHelper), reading_service=ProcessReading(1)) as loader:
            items = iter(loader)
            next(items)
            os.kill(loader.reading_service.health()[0]["pid"], signal.SIGKILL)
            killed = time.monotonic()
            with pytest.raises(WorkerError, match="SIGKILL"):
                next(items)
            assert time.monotonic() - killed < 10  # and not the minute of the helper
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def versions(make, service, n):
    "The versions in each item of a run that counts an update after each."
    actor = Learning(1.0)
    found = []
    with DataLoader2(
        make(Lanes(fragments(actor=actor, n_steps=4, n_envs=2), 3, 0)), reading_service=service
    ) as loader:
        for item in islice(loader, n):
            found.append(sorted(set(item.version.tolist())))
            bump_version(actor)
    return found


def odd(fragment):
    return int(fragment.seq[0]) % 2 == 1


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "make",
    [
        lambda p: FragmentStacker(Minibatcher(p, 4, seed=0), 2),
        lambda p: FragmentStacker(p.filter(odd), 2),
        lambda p: FragmentStacker(FragmentStacker(p, 3), 2),
        lambda p: FragmentStacker(p, 2),
        lambda p: p,
    ],
    ids=["minibatches", "filter", "stacks of stacks", "two of three", "nothing"],
)
def test_what_stands_between_never_makes_items_older(make):
    "With lag=0 the versions are those of the same graph without workers."
    assert versions(make, ProcessReading(2), 9) == versions(make, None, 9)


class Slow(Plain):
    "An actor that is slow in the process whose lane it is told by the environment's tag."

    def forward(self, obs, act, rew, fin, **context):
        if obs[..., 0].max() > 0:
            time.sleep(0.02)
        return super().forward(obs, act, rew, fin, **context)


def test_ready_order_keeps_to_the_lag():
    "An item that was asked for is given out no more than `lag` groups later, though others are faster."
    made = iter(range(100))
    pipe = Lanes(fragments([lambda: Counting(tag=next(made) % 2)], Slow(), n_steps=2), 2, 0)
    with DataLoader2(
        FragmentStacker(pipe, 2), reading_service=ProcessReading(1, lag=1, order="ready")
    ) as loader:
        seqs = [sorted(zip(b.lane.tolist(), b.seq.tolist())) for b in islice(loader, 30)]
    lanes = [lane for batch in seqs for lane, _ in batch]
    assert all({0, 1} <= set(lanes[k : k + 8]) for k in range(len(lanes) - 8))


def test_seeding_a_loader_of_a_graph_without_lanes():
    "One worker is the serial twin there, too."

    def run(service):
        with DataLoader2(fragments(Lively, Shaky(), n_envs=2), reading_service=service) as loader:
            loader.seed(7)
            return [snapshot(f) for f in islice(loader, 3)]

    assert_same(run(ProcessReading(1)), run(InProcessReadingService()))


class FailsToClose(Counting):
    def close(self):
        raise ZeroDivisionError("closing")


def test_all_seams_are_closed_though_one_fails():
    a, b = (Lanes(fragments(FailsToClose), 1, 0) for _ in range(2))
    loader = DataLoader2(a.zip(b), reading_service=ProcessReading(1))
    for _ in islice(loader, 2):
        pass
    try:
        loader.shutdown()
    except ZeroDivisionError:
        pass
    assert loader.reading_service.health() == []  # and `conftest` looks for processes


# --- what reaches a worker

net = torch.nn.Linear(2, 1)


class Holder:
    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner

    def step(self):
        pass


holder = Holder(net)


def by_default(x, net=net):
    return net(x)


def by_keyword(x, *, net=net):
    return net(x)


def in_comprehension(xs):
    return [net(x) for x in xs]


def of_an_object(x):
    return holder.inner(x)


def in_inner_function(x):
    def inner():
        return net(x)

    return inner()


@pytest.mark.parametrize(
    "found_in",
    [
        by_default,
        by_keyword,
        in_comprehension,
        of_an_object,
        in_inner_function,
        holder,
        {"a": {net}},
    ],
)
def test_modules_are_found_wherever_they_are_used(found_in):
    assert modules_in(found_in) == [net]


def test_an_attribute_that_does_not_travel_is_told(caplog):
    actor = Learning()
    actor.eps = 1.0
    publisher = WeightPublisher([actor])
    try:
        for eps in (1.0, 0.5, 0.25):
            actor.eps = eps
            publisher.publish()
    finally:
        publisher.close()
    assert [r.getMessage().split(" changed")[0] for r in caplog.records] == [
        "attribute eps of Learning"
    ]


def test_a_network_whose_parts_change_is_refused():
    actor = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    publisher = WeightPublisher([actor])
    publisher.publish()
    actor.append(torch.nn.Dropout())
    try:
        with pytest.raises(Exception, match="changed the form of its weights"):
            publisher.publish()
    finally:
        publisher.close()


def test_zipped_sources_are_no_seam():
    "A pipe that reads something else besides."
    pipe = Lanes(fragments(), 2, 0).zip(IterableWrapper(range(5)))
    with DataLoader2(pipe, reading_service=ProcessReading(2)) as loader:
        assert [(int(f.lane[0]), k) for f, k in loader] == [(0, 0), (1, 1), (0, 2), (1, 3), (0, 4)]
