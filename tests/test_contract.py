"""What every reading service with workers promises, whoever they are: processes of this machine, or actors on nodes of a cluster.

What only processes have is in `test_reading.py` and `test_faults.py`, what only a cluster has in `test_ray.py`. The cluster has two nodes,
over which Ray spreads the workers.
"""

import gc
import logging
import os
import re
import signal
import time
from functools import partial
from itertools import islice, product

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from reference import assert_same, snapshot
from toys import Counting, Learning, Ledger, Lively, Plain, Shaky
from worker_cases import (
    WORLDS,
    change,
    gone,
    harmful,
    learned,
    learned_serially,
    outcome,
    serial,
    slack,
    stream,
)

from rollpipe.pipes import (
    ActorError,
    DataError,
    EnvError,
    EnvStepper,
    FragmentCollector,
    FragmentStacker,
    GraphError,
    Lanes,
    ProcessReading,
    RayReading,
    WorkerError,
    rollouts,
)
from rollpipe.pipes.graph.modules import bump_version
from rollpipe.pipes.graph.pipe import restore_stream, stream_state
from rollpipe.pipes.graph.torchdata import (
    DataLoader2,
    InProcessReadingService,
)
from rollpipe.pipes.passes import keep_environments
from rollpipe.pipes.taps import EpisodeStats

pytestmark = pytest.mark.timeout(600)
ON_RAY = pytest.param("ray", marks=pytest.mark.slow)
LAGGED = {}  # lag -> the stream of the first service with it


@pytest.fixture(scope="module", params=["processes", ON_RAY])
def Reading(request):
    "The class of the reading service."
    if request.param == "processes":
        return ProcessReading
    return partial(RayReading, address=request.getfixturevalue("cluster").address)


def pids(loader):
    return [state["pid"] for state in loader.reading_service.health()]


def left(pids, Reading):
    return gone(
        pids, 0 if Reading is ProcessReading else 10
    )  # a loader waits for processes of this machine


# --- the stream


def cases(processes, ray):
    "Arguments of a test: more for processes, as workers of a cluster take long to start."
    on_ray = [pytest.param("ray", *case, marks=pytest.mark.slow) for case in ray]
    return [("processes", *case) for case in processes] + on_ray


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "Reading, workers", cases([(0,), (1,), (2,), (3,), (5,)], [(2,)]), indirect=["Reading"]
)
def test_batches_and_weights_after_20_updates_are_bit_identical(Reading, workers):
    "More workers than lanes are not started."
    assert_same(learned(Reading(workers)), learned_serially())
    assert [b.version.tolist() for b in learned_serially()[0]] == [[k] * 6 for k in range(20)]


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "Reading, world, workers",
    cases(
        product(WORLDS, (1, 2, 3)),
        [("gaussian", 3), ("recurrent", 2), ("episode_lists", 1), ("global_env", 1)],
    ),
    indirect=["Reading"],
)
def test_the_stream_is_that_of_the_serial_twin(Reading, world, workers):
    assert_same(stream(world, Reading(workers)), serial(world))


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "Reading, lag, workers",
    cases(product((1, 2), (1, 2, 3)), [(1, 1), (1, 3)]),
    indirect=["Reading"],
)
def test_a_lag_is_exactly_that(Reading, lag, workers):
    "Batch k was collected by the weights of k - lag updates; the stream depends on the lag alone, and not on the kind of workers."
    found = stream("gaussian", Reading(workers, lag=lag), 6)
    assert [b.version.tolist() for b in found] == [[max(0, k - lag)] * 6 for k in range(6)]
    assert_same(found, LAGGED.setdefault(lag, found))
    assert_same(found[0], serial("gaussian")[0])
    assert (found[1].state.act != serial("gaussian")[1].state.act).any()


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "Reading, world, lag, order",
    cases(
        product(("finite", "unequal"), (0, 1, None), ("canonical", "ready")),
        [("unequal", 1, "canonical"), ("unequal", None, "ready")],
    ),
    indirect=["Reading"],
)
def test_lanes_that_end(Reading, world, lag, order):
    "All that they have arrives, once, whatever was asked for in advance."
    found = stream(world, Reading(2, lag=lag, order=order), n=100)
    told = [(int(f.lane[0]), int(f.seq[0])) for f in found]
    expected = [(int(f.lane[0]), int(f.seq[0])) for f in serial(world, 100)]
    assert len(expected) == {"finite": 6, "unequal": 9}[world]
    if order == "canonical":
        assert told == expected
    for lane in range(3):
        assert [s for k, s in told if k == lane] == sorted(s for k, s in expected if k == lane)


@pytest.mark.parametrize("lag", [2, None])
def test_the_weights_are_those_of_the_version(lag, Reading):
    "What is reported is the parameter itself, which is large enough to go through a store of its own."

    class Wide(Learning):
        def __init__(self):
            super().__init__(0.0)
            self.others = torch.nn.Parameter(torch.zeros(100_000))

    actor = Wide()
    pipe = FragmentStacker(Lanes(FragmentCollector(EnvStepper(Counting, actor, 2), 3), 2, 0), 2)
    with DataLoader2(pipe, reading_service=Reading(2, lag=lag)) as loader:
        for k, f in enumerate(islice(loader, 8)):
            assert (f.actor["weight"][:-1] == f.version).all()
            if lag is not None:
                assert f.version.tolist() == [max(0, k - lag)] * 4
            else:
                assert 0 <= k - int(f.version.min()) <= 5
            with torch.no_grad():
                actor.weight += 1
            bump_version(actor)


def test_ready_order_does_not_wait_for_a_slow_lane(tmp_path, Reading):
    "Lane 1 waits for a file that is written when lane 0 has given three fragments; then each lane has given its own in their order."
    gate = tmp_path / "gate"

    class Waits(Counting):
        def step(self, action):
            from multiprocessing import current_process
            from time import sleep

            while current_process().name == "worker 1" and not gate.exists():
                sleep(0.01)
            return super().step(action)

    pipe = Lanes(FragmentCollector(EnvStepper(lambda: Waits(), Plain()), 2), 2, 0)
    with DataLoader2(pipe, reading_service=Reading(2, lag=None, order="ready")) as loader:
        items = iter(loader)
        begin = time.monotonic()
        told = [next(items) for _ in range(3)]
        assert [int(f.lane[0]) for f in told] == [0] * 3
        gate.touch()
        while told[-1].lane[0] == 0 and time.monotonic() - begin < 60 * slack():
            told.append(next(items))  # it may still be starting
        told += [next(items) for _ in range(10)]
    assert 1 in [int(f.lane[0]) for f in told]
    for lane in (0, 1):
        seqs = [int(f.seq[0]) for f in told if f.lane[0] == lane]
        assert seqs == list(range(len(seqs)))


def test_what_is_kept_stays_as_it_was_and_belongs_to_the_consumer(Reading):
    "Observations of 5 MB, kept by the consumer."

    class Large(Counting):
        observation_space = Box(-np.inf, np.inf, (60_000,))

        def look(self):
            return np.repeat(super().look(), 15_000)

    pipe = Lanes(FragmentCollector(EnvStepper(lambda: Large(), Plain()), 20), 2, 0)
    expected = [snapshot(f) for f in islice(pipe, 10)]
    kept = []
    with DataLoader2(pipe, reading_service=Reading(2, lag=1)) as loader:
        for f, known in zip(loader, expected):
            assert_same(snapshot(f), known)
            f.state.rew[:] = f.state.obs[0, 0, 0] = known.state.rew[:] = known.state.obs[
                0, 0, 0
            ] = -1
            kept.append(f)
    for f, known in zip(kept, expected):
        assert_same(snapshot(f), known)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("lag", [0, 1])
def test_another_iteration_goes_on_from_the_state(lag, Reading):
    "Also with another number of workers."

    def part(workers, start, n, state):
        pipe, actor = WORLDS["recurrent"](3)
        keep_environments(pipe)
        for _ in range(start):
            change(actor)
        with DataLoader2(
            restore_stream(pipe, state), reading_service=Reading(workers, lag=lag)
        ) as loader:
            items = iter(loader)
            found = []
            for _ in range(n):
                found.append(snapshot(next(items)))
                change(actor)
            return found, stream_state(loader.datapipe)

    first, state = part(2, 0, 2, {})
    assert_same(first + part(1, 2, 3, state)[0], stream("recurrent", Reading(2, lag=lag), 5))


# --- graphs


def test_without_lanes(Reading):
    "One worker is the serial twin; several are as many lanes."
    make = lambda seed: (
        lambda lanes: (FragmentCollector(EnvStepper(Lively, Shaky(), 2, seed=seed), 4), Shaky())
    )
    assert_same(stream(make(7), Reading(1)), stream(make(7), None))
    two = stream(make(7), Reading(2))
    assert [f.lane.tolist() for f in two] == [[0, 0], [1, 1]] * 2
    assert_same(two, stream(lambda lanes: (Lanes(make(7)(0)[0], 2), Shaky()), None))


def test_graphs_that_cannot_run_in_workers(Reading):
    "They are refused before anything is started."
    told = []
    with pytest.raises(GraphError, match="nothing here can run in worker processes.*Lanes"):
        next(iter(DataLoader2(EnvStepper(Counting, Plain()), reading_service=Reading(1))))
    with pytest.raises(
        GraphError, match=r"^EpisodeStats: in a worker process .* Expected taps below `Lanes`"
    ):
        tapped = EpisodeStats(FragmentCollector(EnvStepper(Counting, Plain()), 3), told.append)
        iter(DataLoader2(Lanes(tapped, 2), reading_service=Reading(2)))
    with pytest.raises(EnvError, match="Counting"):
        iter(
            DataLoader2(
                Lanes(FragmentCollector(EnvStepper(Counting(), Plain()), 3), 1),
                reading_service=Reading(1),
            )
        )


def test_options_out_of_range(Reading):
    name = getattr(Reading, "func", Reading).__name__
    for options in (
        dict(num_workers=-1),
        dict(num_workers=1.5),
        dict(num_workers=True),
        dict(num_workers=1, lag=-1),
        dict(num_workers=1, lag=0.5),
        dict(num_workers=1, order="any"),
        dict(num_workers=1, worker_threads=0),
        dict(num_workers=1, restart=-1),
        dict(num_workers=1, silence=0),
        dict(num_workers=1, on_silence="cry"),
        dict(num_workers=1, grace=-1),
    ):
        with pytest.raises(DataError, match=f"{name}, leaf {list(options)[-1]}: out of range"):
            Reading(**options)


# --- the life of a loader


def test_a_second_iteration_is_a_fresh_start(Reading):
    "Its workers are others, and the end of the first one does not concern it. What runs is told by `health`."
    pipe, _ = WORLDS["global_generator"](3)
    expected = [snapshot(x) for x in islice(pipe, 3)]
    with DataLoader2(pipe, reading_service=Reading(2, lag=1)) as loader:
        first = iter(loader)
        assert loader.reading_service.health() == []  # none is started before the first item
        assert_same(snapshot(next(first)), expected[0])
        told = loader.reading_service.health()
        assert [(w["worker"], w["alive"], w["lanes"], w["restarted"]) for w in told] == [
            (0, True, [0, 2], 0),
            (1, True, [1], 0),
        ]
        assert (
            all(0 <= w["silent"] < 60 * slack() for w in told)
            and len({w["pid"] for w in told} | {os.getpid()}) == 3
        )
        second = iter(loader)
        assert_same(snapshot(next(second)), expected[0])
        assert {w["pid"] for w in told}.isdisjoint(pids(loader)) and gone(
            [w["pid"] for w in told], 10
        ) == []
        with pytest.raises(RuntimeError):
            next(first)
        del first
        gc.collect()
        assert_same(snapshot(next(second)), expected[1])


def test_a_finite_stream_twice(Reading):
    with DataLoader2(WORLDS["finite"](3)[0], reading_service=Reading(2)) as loader:
        for _ in range(2):
            assert len(list(loader)) == 6
            assert loader.reading_service.health() == []  # its workers end with it


def test_seeds(Reading):
    "`DataLoader2.seed` fixes what has no seed of its own, as in-process."

    def run(service):
        pipe = rollouts(Lively, Shaky(), n_envs=2, n_steps=4, lanes=2).shuffle(buffer_size=2)
        with DataLoader2(pipe, reading_service=service) as loader:
            loader.seed(7)
            return [snapshot(x) for _ in range(2) for x in islice(loader, 2)]

    assert_same(run(Reading(2)), run(InProcessReadingService()))


@pytest.mark.parametrize("lag", [0, 1, None])
def test_pause_resume_and_limit(lag, Reading):
    "While paused, nothing is collected; then it goes on as if nothing had been."
    pipe, _ = WORLDS["memory"](2)
    expected = [snapshot(x) for x in islice(pipe, 6)]
    with DataLoader2(pipe, reading_service=Reading(2, lag=lag)) as loader:
        items = iter(loader)
        items.limit(2)
        assert_same([snapshot(x) for x in items], expected[:2])
        assert sum(state["requests"] for state in loader.reading_service.health()) == 0
        assert list(items) == []
        items.resume()
        assert_same([snapshot(x) for x in items], expected[2:4])
        items.limit(None)
        items.resume()
        assert_same([snapshot(x) for x in islice(items, 2)], expected[4:])


def test_shutdown_in_the_middle(Reading):
    loader = DataLoader2(WORLDS["memory"](2)[0], reading_service=Reading(2, lag=1))
    items = iter(loader)
    next(items)
    workers = pids(loader)
    loader.shutdown()
    assert loader.reading_service.health() == [] and left(workers, Reading) == []
    with pytest.raises((StopIteration, TypeError, RuntimeError)):
        next(items)
    loader.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        iter(loader)


def test_environments_are_closed_in_the_workers(tmp_path, Reading):
    "Also in the middle of a step that takes a minute, which is not waited for."

    class Tells(Counting):
        def step(self, action):
            if self.count == 3 and (tmp_path / "slow").exists():
                time.sleep(60)
            return super().step(action)

        def close(self):
            (tmp_path / f"{os.getpid()}-{id(self)}").touch()

    Ledger.clear()
    for slow in (False, True):
        if slow:
            (tmp_path / "slow").touch()
        pipe = Lanes(
            FragmentCollector(EnvStepper(lambda: Tells([(50, "term")]), Plain(), 2), 2), 2, 0
        )
        with DataLoader2(pipe, reading_service=Reading(2, lag=1, grace=20)) as loader:
            next(iter(loader))
            time.sleep(0.5)
            start = time.monotonic()
        assert time.monotonic() - start < 20
    assert (
        len(list(tmp_path.glob("*-*"))) == 8 and Ledger.made == []
    )  # and this process makes no environment


def test_records(Reading):
    with DataLoader2(WORLDS["memory"](3)[0], reading_service=Reading(2)) as loader:
        list(islice(loader, 2))
        records = list(loader.reading_service.records)
    assert [(r.lane, r.worker, r.publication) for r in records] == [
        (0, 0, 0),
        (1, 1, 0),
        (2, 0, 0),
    ] * 2
    assert all(r.begin <= r.end <= r.received and r.copied_bytes > 0 for r in records)


# --- faults

RAISED = {  # (harm, call, at) -> type, what the message says, what the traceback says
    ("raise", "factory", 1): (
        EnvError,
        r"EnvStepper, lane 1, environment 0 .*ZeroDivisionError: an accident",
        "in __init__",
    ),
    ("raise", "actor", 7): (
        ActorError,
        r"EnvStepper, lane 1: HarmfulActor.step raised ZeroDivisionError: an acc",
        "in forward",
    ),
    ("raise", "pipe", "close"): (ZeroDivisionError, "an accident", "in stream"),
    ("unpicklable", "pipe", 2): (
        DataError,
        r"lane 1, leaf Fragment.env\['a generator'\]: .*cannot pickle 'generator' .*[gG]ot generator",
        "in write",
    ),
}


@pytest.mark.parametrize("case", RAISED, ids=lambda case: "-".join(map(str, case)))
def test_exceptions_arrive_with_their_traceback(case, Reading):
    kind, pattern, place = RAISED[case]
    error, text, cause = outcome(harmful(*case), Reading(2, lag=1))
    assert type(error) is kind and re.search(pattern, text, re.S), error
    assert (
        "in worker 1, lane 1" in cause
        and "Traceback (most recent call last)" in cause
        and place in cause
    ), cause
    assert "\x1b" not in cause and (case[0] != "raise" or "in do\n" in cause)


def test_an_exception_is_no_death(Reading):
    "It would come again; it is raised whatever `restart` says."
    error, text, _ = outcome(harmful("raise", "step", 7), Reading(2, lag=None, restart=3))
    assert type(error) is EnvError and re.search(
        r"EnvStepper, lane 1, environment 0 .*: step\(\) raised ZeroDivisionError: an acc", text
    )


def test_the_log_says_who_has_called_exit(caplog, Reading):
    "The error says only that the worker has ended."
    error, text, _ = outcome(harmful("leave", "step", 7), Reading(2))
    assert isinstance(error, WorkerError) and re.search(
        r"worker 1 \(pid \d+\).* ended with exit code 5 while it collected lane 1", text
    )
    assert re.search(
        r"(?s)in worker 1, EnvStepper:\nTraceback .* in do\n.*SystemExit: 5", caplog.text
    )


def test_a_death_is_told_with_all_lanes_of_the_worker(Reading):
    "Soon, and the loader closes without waiting for the dead."
    with DataLoader2(
        harmful("raise", "step", 10**9, lanes=4), reading_service=Reading(2, lag=1)
    ) as loader:
        items = iter(loader)
        next(items), next(items)
        os.kill(pids(loader)[1], signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(WorkerError, match=r"lane 1, 3: worker 1 \(pid \d+\)"):
            for _ in items:
                pass
        assert not gone(pids(loader), 10)
    assert time.monotonic() - start < 10 * slack()


def test_lanes_start_anew_elsewhere(caplog, Reading):
    """Two deaths are survived, the third is raised. What was lost starts anew, with `seq` 0 and other random numbers.

    The other lane goes on as if nothing had been. The log and the stream say so.
    """
    pipe = Lanes(FragmentCollector(EnvStepper(Lively, Shaky()), 4), 3, 0)
    other = [snapshot(f) for f in islice(pipe, 30) if f.lane[0] == 1]
    lost = []
    told = {0: [], 1: [], 2: []}
    with (
        caplog.at_level(logging.WARNING, "rollpipe"),
        DataLoader2(pipe, reading_service=Reading(2, restart=2)) as loader,
    ):
        items = iter(loader)
        for k in range(24):
            f = next(items)
            told[int(f.lane[0])].append(f)
            if k in (8, 14):
                state = loader.reading_service.health()[0]
                assert state["lanes"] == [0, 2] and state["restarted"] == len(lost)
                lost.append(state["pid"])
                os.kill(state["pid"], signal.SIGKILL)
                assert gone([state["pid"]], 5) == []
        assert [w["restarted"] for w in loader.reading_service.health()] == [2, 2] and lost[
            1
        ] not in pids(loader)
        os.kill(pids(loader)[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match="lane 1: worker 1 "):
            for _ in items:
                pass
    assert [f.seq.tolist() for f in told[1]] == [[k] for k in range(8)] and {
        f.restarts for f in told[1]
    } == {None}
    for f, g in zip(told[1], other):
        assert np.array_equal(f.state.obs, g.state.obs)
    for lane in (0, 2):
        assert [int(f.seq[0]) for f in told[lane]] == [0, 1, 2, 0, 1, 0, 1, 2]
        assert [None if f.restarts is None else f.restarts.tolist() for f in told[lane]] == [
            None
        ] * 3 + [[1]] * 2 + [[2]] * 3
        starts = {tuple(f.state.obs[0, 0].tolist()) for f in told[lane] if f.seq[0] == 0}
        assert len(starts) == 3  # other random numbers
    text = [r.getMessage() for r in caplog.records]
    how = "SIGKILL" if Reading is ProcessReading else "died"
    assert len(text) == 2 and all(
        re.search(
            rf"(?s)worker 0 \(pid {pid}\).*{how}.*Its lanes start anew \(restart {k} of 2\)", line
        )
        for k, (pid, line) in enumerate(zip(lost, text), 1)
    ), text


@pytest.mark.slow
def test_a_slow_worker_is_reported_with_its_place(caplog, tmp_path, Reading):
    "Again after twice the time; and it is waited for. With `on_silence='raise'` it ends the run."
    gate = tmp_path / "gate"

    class Waits(Counting):
        def step(self, action):
            if self.count == 2:
                self.wait_for_the_robot()
            return super().step(action)

        def wait_for_the_robot(self):
            while not gate.exists():
                time.sleep(0.2)

    class Opens(logging.Handler):
        def emit(self, record):
            if len(caplog.records) >= 2:
                gate.touch()

    pipe = Lanes(FragmentCollector(EnvStepper(lambda: Waits(), Plain(), info_keys=()), 5), 1, 0)
    told = r"(?s)lane 0: worker 0 \(pid \d+\).* has been silent for \d+ s; it is here:.*in wait_for_the_robot\n"
    logging.getLogger("rollpipe").addHandler(opens := Opens())
    try:
        with (
            caplog.at_level(logging.WARNING, "rollpipe"),
            DataLoader2(pipe, reading_service=Reading(1, silence=1.5)) as loader,
        ):
            assert len(list(islice(loader, 2))) == 2
    finally:
        logging.getLogger("rollpipe").removeHandler(opens)
    assert len(caplog.records) >= 2 and all(
        r.levelname == "WARNING" and re.search(told, r.getMessage()) for r in caplog.records
    )
    gate.unlink()
    with pytest.raises(WorkerError, match=told):
        with DataLoader2(
            pipe, reading_service=Reading(1, silence=2, on_silence="raise", grace=5)
        ) as loader:
            list(islice(loader, 2))


def test_what_cannot_be_sent_is_told_before_anything_starts(Reading):
    actor = Shaky()
    actor.stream = (x for x in ())
    pipe = Lanes(FragmentCollector(EnvStepper(Lively, actor), 4), 2, 0)
    options = dict(start_method="spawn") if Reading is ProcessReading else {}
    with pytest.raises(
        WorkerError,
        match="EnvStepper: Shaky cannot be sent to a worker: TypeError: cannot pickle 'generator' object",
    ):
        next(iter(DataLoader2(pipe, reading_service=Reading(2, **options))))


def test_an_exception_in_the_learners_loop_ends_the_workers_at_once(Reading):
    with pytest.raises(KeyError):
        with DataLoader2(
            harmful("hang", "step", 9), reading_service=Reading(2, lag=1, grace=1)
        ) as loader:
            for _ in loader:
                workers = pids(loader)
                raise KeyError("a learner's")
    assert left(workers, Reading) == []
