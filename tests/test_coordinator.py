"Worker processes at their borders: slow closing, long queues, helpers that outlive a worker, groups, late weights."

import os
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import islice

import pytest
from local_crew import LocalReading
from reference import assert_same, snapshot
from toys import Counting, Learning, Lively, Plain, Scripted, Shaky, fail

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
from rollpipe.pipes.graph.modules import bump_version
from rollpipe.pipes.graph.torchdata import InProcessReadingService, IterableWrapper


def fragments(env=Counting, actor=None, n_steps=2, **kwargs):
    return FragmentCollector(EnvStepper(env, actor or Plain(), **kwargs), n_steps)


def slow_to_close(folder):
    "An environment that needs 0.8 s to close, and writes down that it was done."

    def close(env):
        time.sleep(0.8)
        (folder / str(os.getpid())).write_text("closed")

    return lambda: Scripted(before={"close": close})


@pytest.mark.parametrize("grace, n_closed", [(5.0, 2), (0.1, 0)])
def test_environments_have_the_time_to_close(grace, n_closed, tmp_path):
    "But they are not waited for longer than `grace`."
    pipe = Lanes(fragments(slow_to_close(tmp_path)), 2, 0)
    with DataLoader2(pipe, reading_service=ProcessReading(2, lag=1, grace=grace)) as loader:
        assert len(list(islice(loader, 3))) == 3
    assert len(list(tmp_path.iterdir())) == n_closed


@pytest.mark.slow
def test_hundreds_of_requests_for_one_worker():
    "More than a connection holds: they are sent in parts."
    with DataLoader2(
        fragments(), reading_service=LocalReading(1, lag=None, n_buffers=450)
    ) as loader:
        assert [int(f.seq[0]) for f in islice(loader, 600)] == list(range(600))


def test_a_death_is_noticed_though_a_helper_holds_the_connection(tmp_path):
    "A process that the environment has started inherits all descriptors, and outlives it."
    file = tmp_path / "pid"

    def start_helper(env):
        words = [sys.executable, "-c", "import time; time.sleep(60)"]
        file.write_text(str(subprocess.Popen(words, close_fds=False).pid))

    pipe = fragments(lambda: Scripted(before={"make": start_helper}))
    try:
        with DataLoader2(pipe, reading_service=ProcessReading(1)) as loader:
            items = iter(loader)
            next(items)
            os.kill(loader.reading_service.health()[0]["pid"], signal.SIGKILL)
            killed = time.monotonic()
            with pytest.raises(WorkerError, match="SIGKILL"):
                next(items)
            assert time.monotonic() - killed < 10  # and not the minute of the helper
    finally:
        os.kill(int(file.read_text()), signal.SIGKILL)


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
    assert versions(make, LocalReading(2), 9) == versions(make, None, 9)


def test_seeding_a_loader_of_a_graph_without_lanes():
    "One worker is the serial twin there, too."

    def run(service):
        with DataLoader2(fragments(Lively, Shaky(), n_envs=2), reading_service=service) as loader:
            loader.seed(7)
            return [snapshot(f) for f in islice(loader, 3)]

    assert_same(run(LocalReading(1)), run(InProcessReadingService()))


def test_all_seams_are_closed_though_one_fails():
    env = partial(Scripted, before={"close": fail(ZeroDivisionError("closing"))})
    a, b = (Lanes(fragments(env), 1, 0) for _ in range(2))
    loader = DataLoader2(a.zip(b), reading_service=LocalReading(1))
    for _ in islice(loader, 2):
        pass
    try:
        loader.shutdown()
    except ZeroDivisionError:
        pass
    assert loader.reading_service.health() == []


# --- what reaches a worker


def test_zipped_sources_are_no_seam():
    "A pipe that reads something else besides."
    pipe = Lanes(fragments(), 2, 0).zip(IterableWrapper(range(5)))
    with DataLoader2(pipe, reading_service=LocalReading(2)) as loader:
        assert [(int(f.lane[0]), k) for f, k in loader] == [(0, 0), (1, 1), (0, 2), (1, 3), (0, 4)]
