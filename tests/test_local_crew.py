"""Laws of the coordinator with workers that are no processes: whatever happens to a worker at any item, and whoever is quick.

What a worker process and a worker of a cluster promise stands here once; what only real ones can show is in
`test_faults.py`, `test_reading.py`, `test_contract.py` and `test_ray.py`.
"""

import re
from itertools import islice, product
from math import inf

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from local_crew import CREWS, Clock, Fault, Plan
from reference import assert_same, snapshot
from toys import Lively, Shaky
from worker_cases import SPACES, WORLDS, change, serial, stream

from rollpipe.layers import GaussianPolicy, MLPPolicy
from rollpipe.pipes import EnvStepper, FragmentCollector, FragmentStacker, Lanes, WorkerError
from rollpipe.pipes.data.errors import EnvError
from rollpipe.pipes.graph.pipe import restore_stream, stream_state
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.pipes.passes import keep_as, keep_environments
from rollpipe.pipes.workers.process import WorkerDied, WorkerNotStarted

N_LANES = 3
each_crew = pytest.mark.parametrize("Reading", CREWS.values(), ids=CREWS)


def pipeline(keeps=False):
    "Three lanes of an actor that learns, and that draws from the global generators."
    actor = GaussianPolicy.for_env(SPACES, hidden=(4,), seed=0)
    pipe = Lanes(FragmentCollector(EnvStepper(Lively, actor, 2), 3), N_LANES, seed=1)
    if keeps:
        keep_environments(pipe)
    return pipe, actor


def collected(service, n=9, keeps=False, begun=0, state=None):
    """The items `begun`, ..., `n - 1`, and the error that ended them. The actor changes after each of the first 20.

    With a `state`, which the stream goes on from, the state after the last item stands in place of the error.
    """
    pipe, actor = pipeline(keeps or state is not None)
    for _ in range(begun):
        change(actor)
    if state is not None:
        restore_stream(pipe, state)
    items = []
    try:
        with DataLoader2(pipe, reading_service=service) as loader:
            for number, item in enumerate(islice(loader, n - begun), begun):
                items.append(item)
                if number < 20:
                    change(actor)
                if state is not None and number == n - 1:
                    return items, stream_state(loader.datapipe)
    except Exception as e:
        return items, e
    return items, None


def alike(items):
    "Snapshots without what says how often a lane began anew."
    return [snapshot(item._replace(restarts=None)) for item in items]


def lanes_of(worker, workers):
    return range(worker, N_LANES, workers)


# --- whoever is quick


@each_crew
@pytest.mark.parametrize("world", WORLDS)
def test_the_stream_of_every_world_is_the_serial_one(world, Reading):
    "With each kind of environment, actor and collector."
    found = stream(world, Reading(2, plan=Plan(speeds=0)))
    assert_same(found, serial(world))


@pytest.mark.slow_but_one
@each_crew
@settings(deadline=None, max_examples=8)
@given(
    speeds=st.integers(0, 10**6),
    lag=st.integers(0, 4),
    workers=st.integers(1, 3),
    width=st.integers(1, 4),
)
def test_the_stream_does_not_depend_on_who_answers_when(Reading, speeds, lag, workers, width):
    "It depends on the lag alone: batch k has the weights of k - lag updates."

    def joined(lanes):
        pipe, actor = pipeline()
        return FragmentStacker(pipe, width), actor

    found = stream(joined, Reading(workers, lag=lag, plan=Plan(speeds=speeds)), 4)
    assert_same(found, stream(joined, Reading(1, lag=lag, plan=Plan()), 4))
    assert [x.version.tolist() for x in found] == [[max(0, k - lag)] * 2 * width for k in range(4)]
    if lag == 0:
        assert_same(found, stream(joined, None, 4))


@pytest.mark.slow_but_one
@each_crew
@settings(deadline=None, max_examples=8)
@given(speeds=st.integers(0, 10**6), lag=st.integers(0, 3) | st.none(), workers=st.integers(1, 3))
def test_in_ready_order_every_item_comes_once_and_none_is_older_than_twice_the_lag(
    Reading, speeds, lag, workers
):
    "Of lag + 1 open requests one is handed out; the oldest of the others follows at most lag + 1 updates later, and the last 2 * lag."
    service = Reading(workers, lag=lag, order="ready", plan=Plan(speeds=speeds))
    items, error = collected(service, 20)
    assert error is None and len(items) == 20
    for lane in range(N_LANES):
        seqs = [int(x.seq[0]) for x in items if x.lane[0] == lane]
        assert seqs == list(range(len(seqs)))
    ages = [k - int(x.version[0]) for k, x in enumerate(items)]
    assert min(ages) >= 0 and (lag is None or max(ages) <= 2 * lag)


@pytest.mark.slow_but_one
@each_crew
@pytest.mark.parametrize("world, n", [("finite", 6), ("unequal", 9)])
def test_lanes_that_end(world, n, Reading):
    "All that they have arrives, once, whatever was asked for in advance."
    expected = serial(world, 100)
    assert len(expected) == n
    for lag, order, speeds in product((0, 1, None), ("canonical", "ready"), (None, 1, 2)):
        found = stream(world, Reading(2, lag=lag, order=order, plan=Plan(speeds=speeds)), 100)
        if order == "ready":
            key = lambda f: (int(f.lane[0]), int(f.seq[0]))
            assert sorted(map(key, found)) == sorted(map(key, expected))
        else:
            assert [f.lane.tolist() for f in found] == [f.lane.tolist() for f in expected]


# --- deaths

MOMENTS = [(workers, worker) for workers in (1, 2) for worker in range(workers)]
LAGS = [("processes", 0), ("processes", 2), ("Ray", 1)]


@pytest.mark.slow_but_one
@pytest.mark.parametrize("workers, worker", MOMENTS)
@pytest.mark.parametrize(
    "kind, crew, lag",
    [
        *((kind, *case) for kind in ("dies before", "dies after") for case in LAGS),
        ("loses", "Ray", 1),
    ],
)
def test_a_death_at_any_item(kind, workers, worker, crew, lag, monkeypatch, caplog):
    """Without a restart, the items before it are those of the serial twin, and the error names worker, lanes and the item's lane.

    With one, lanes whose environments are kept go on as if nothing had been; others start anew, with other numbers, and the stream tells
    of it.
    """
    own = lanes_of(worker, workers)
    names = ", ".join(map(str, own))
    clock = Clock().install(monkeypatch)

    def read(item, **options):
        plan = Plan([] if item is None else [Fault(kind, worker, item)], clock=clock)
        return CREWS[crew](workers, lag=lag, plan=plan, **options)

    whole, _ = collected(read(None))
    for item in range(3):
        # The worker's items are of its lanes in turn.
        lane = own[item % len(own)]
        place = item // len(own) * N_LANES + lane

        items, error = collected(read(item))
        assert_same(alike(items), alike(whole)[: len(items)])
        assert place - lag <= len(items) <= place
        assert isinstance(error, WorkerDied) and re.fullmatch(
            rf"lane {names}: worker {worker} \(pid \d+\).* (was killed by SIGKILL|died \(killed on order\))"
            rf" while it collected lane {lane}\.",
            str(error),
        ), error

        caplog.clear()
        items, error = collected(read(item, restart=1), keeps=True)
        assert error is None and all(x.restarts is None for x in items)
        assert_same(alike(items), alike(whole))
        (message,) = caplog.messages
        assert message.endswith("Its lanes go on where they were (restart 1 of 1).")

        caplog.clear()
        items, error = collected(read(item, restart=1))
        assert error is None and [int(x.lane[0]) for x in items] == [0, 1, 2] * 3
        (message,) = caplog.messages
        assert message.endswith("Its lanes start anew (restart 1 of 1).")
        for k, (x, known) in enumerate(zip(items, whole)):
            if k < place or k % N_LANES not in own:
                assert x.restarts is None
                assert_same(alike([x]), alike([known]))
            else:
                before = sum(own[j % len(own)] == k % N_LANES for j in range(item))
                assert x.restarts.tolist() == [1, 1]
                assert x.seq.tolist() == [k // N_LANES - before] * 2
                assert (x.state.obs != known.state.obs).any()


@each_crew
def test_more_deaths_than_restarts(Reading, caplog):
    "Each start gives other numbers, and the last death is raised."
    faults = [Fault("dies before", 0, item) for item in (2, 1, 1)]
    items, error = collected(Reading(2, restart=2, plan=Plan(faults)), 30)
    own = [(int(x.lane[0]), int(x.seq[0]), x.restarts) for x in items if x.lane[0] != 1]
    counts = [0 if restarts is None else int(restarts[0]) for *_, restarts in own]
    assert [(lane, seq) for lane, seq, _ in own] == [(0, 0), (2, 0), (0, 0), (2, 0)]
    assert counts == [0, 0, 1, 2] and isinstance(error, WorkerDied)
    assert "lane 0, 2: worker 0 " in str(error)
    assert [re.search(r"\(restart \d of \d\)", text)[0] for text in caplog.messages] == [
        "(restart 1 of 2)",
        "(restart 2 of 2)",
    ]
    starts = [x.state.obs[0].tolist() for x in items if x.lane[0] == 0 and x.seq[0] == 0]
    assert starts[0] != starts[1]


class CountsItsSteps(gym.Env):
    "It is paid the number of its steps, and cannot tell its state after the twelfth."

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)
    n_steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.n_steps += 1
        return np.zeros(1, np.float32), float(self.n_steps), False, False, {}

    def get_state(self):
        if self.n_steps > 12:
            raise EnvError("it has made too many steps")
        return dict(n_steps=self.n_steps)

    def set_state(self, state):
        self.n_steps = state["n_steps"]


@each_crew
def test_a_lane_that_began_again_goes_on_after_the_next_death(Reading, caplog):
    "It had no state at the first death, and has one at the second."
    actor = MLPPolicy.for_env(CountsItsSteps(), seed=0)
    pipe = Lanes(FragmentCollector(EnvStepper(CountsItsSteps, actor, 1), 4), 1, seed=0)
    keep_as(pipe, ["own"])
    plan = Plan([Fault("dies before", 0, 4), Fault("dies before", 0, 2)])
    with DataLoader2(pipe, reading_service=Reading(1, restart=2, plan=plan)) as loader:
        items = [snapshot(item) for item in islice(loader, 8)]
    restarts = [None if item.restarts is None else item.restarts.tolist() for item in items]
    first_rewards = [item.state.rew[1, 0].item() for item in items]
    assert [item.seq.tolist() for item in items] == [[0], [1], [2], [3], [0], [1], [2], [3]]
    assert restarts == [None] * 4 + [[1]] * 4
    assert first_rewards == [1, 5, 9, 13, 1, 5, 9, 13]
    assert ["go on where they were" in text for text in caplog.messages] == [False, True]


@each_crew
def test_an_exception_is_no_death(Reading):
    "It would come again; it is raised whatever `restart` says, at the item in which it happens."

    class Fails(Lively):
        def step(self, action):
            if self.np_random.random() < 0.05:
                raise ZeroDivisionError("an accident")
            return super().step(action)

    pipe = Lanes(FragmentCollector(EnvStepper(lambda: Fails(), Shaky(), 2), 3), 3, seed=1)
    serial_items = []
    with pytest.raises(Exception) as expected:
        for item in pipe:
            serial_items.append(snapshot(item))
    assert serial_items
    for workers, restart in product((1, 2, 3), (0, 3)):
        items = []
        with (
            pytest.raises(type(expected.value)) as found,
            DataLoader2(pipe, reading_service=Reading(workers, restart=restart)) as loader,
        ):
            for item in loader:
                items.append(snapshot(item))
        assert str(found.value) == str(expected.value)
        assert "in step\n" in str(found.value.__cause__)
        assert_same(items, serial_items)


def test_a_death_behind_an_open_connection_is_noticed(monkeypatch):
    "As if a process that the worker has started held the connection."
    clock = Clock().install(monkeypatch)
    plan = Plan([Fault("dies unseen", 1, 1)], clock=clock)
    items, error = collected(CREWS["processes"](2, plan=plan))
    assert len(items) == 4 and clock.now < 1
    assert isinstance(error, WorkerDied) and "lane 1: worker 1 (pid " in str(error)


def test_a_worker_that_dies_at_its_start():
    "What is told is what a script of the user must look like."
    service = CREWS["processes"](2, plan=Plan([Fault("dies at its start", 1)]))
    _, error = collected(service)
    assert isinstance(error, WorkerNotStarted) and re.fullmatch(
        r"lane 1: worker 1 \(pid \d+\) ended with exit code 1 while it was started\. Expected .*__main__.*",
        str(error),
    )


# --- silence


@pytest.mark.slow_but_one
@each_crew
@pytest.mark.parametrize("order, lag", [("canonical", 0), ("canonical", 2), ("ready", None)])
@pytest.mark.parametrize("item", [0, 2])
def test_silence_is_told_after_its_time_and_then_each_time_after_twice_as_long(
    item, order, lag, Reading, monkeypatch, caplog
):
    "What is late is not lost, and messages of others do not hide the silence. On demand the first message is an error."
    # A process that starts has a minute. In a cluster, a worker tells that it has started.
    patience = 60 if item == 0 and Reading is CREWS["processes"] else 10
    step = 0.01 if order == "canonical" else patience / 10
    clock = Clock(step).install(monkeypatch)
    n = 8 if order == "canonical" else 120

    def read(until=0.0, **options):
        plan = Plan([Fault("is silent", 1, item, until)], clock=clock)
        return Reading(2, lag=lag, order=order, silence=10, grace=0, plan=plan, **options)

    # It goes on after the third message.
    items, error = collected(read(6 * patience), n)
    assert error is None
    told = r"lane 1: worker 1 .*has been silent for (\d+) s; it is here:\n"
    times = [int(re.match(told, text)[1]) for text in caplog.messages]
    assert times == pytest.approx([patience, 2 * patience, 4 * patience], abs=0.5 + step)
    if order == "canonical":
        assert_same(alike(items), alike(collected(read(), 8)[0]))
    else:
        seqs = [int(x.seq[0]) for x in items if x.lane[0] == 1]
        assert seqs == list(range(len(seqs))) and len(seqs) > item

    _, error = collected(read(inf, on_silence="raise"), n)
    assert type(error) is WorkerError and re.match(told, str(error))


# --- states


@pytest.mark.slow_but_one
@pytest.mark.parametrize("crew, lag", LAGS)
def test_a_stream_goes_on_from_the_state_after_any_item(crew, lag):
    "With what was collected in advance; also with another number of workers."
    Reading = CREWS[crew]
    whole, _ = collected(Reading(1, lag=lag), 6)
    for n in range(1, 6):
        first, state = collected(Reading(1 + n % 3, lag=lag), n, state={})
        rest, _ = collected(Reading(2, lag=lag), 6, begun=n, state=state)
        assert_same(alike(first + rest), alike(whole))
