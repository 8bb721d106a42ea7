"""A stream that is interrupted and goes on in another iteration equals the one that was never interrupted, bit for bit.

The state goes through the encoding of checkpoints, in which nothing can be executed.
"""

import os
import re
import signal
from functools import partial
from itertools import count
from multiprocessing import current_process

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import assert_same, snapshot
from resuming import encoded, part, resumes, told
from tensor_worlds import CartPole
from test_laws_of_pipes import LateInfos
from toys import Counting, Lively, Plain, Shaky
from worker_cases import SPACES, WORLDS, Images, _above, _recipe, change

from rollpipe.layers import CategoricalPolicy, Critic, GaussianPolicy, RecurrentPolicy
from rollpipe.pipes import (
    CheckpointError,
    EnvError,
    EnvStepper,
    EpisodeStats,
    FragmentCollector,
    FragmentStacker,
    FrameStack,
    Lanes,
    Minibatcher,
    Pipe,
    PipeError,
    ProcessReading,
    RewardScaler,
    StepMerger,
    Tap,
    ToDevice,
    WorkerError,
    rollouts,
)
from rollpipe.pipes.graph.pipe import restore_stream, stream_state, unknown_states
from rollpipe.pipes.graph.torchdata import DataLoader2, IterableWrapper
from rollpipe.pipes.passes import keep_as, keep_environments
from rollpipe.pipes.steps import Fragments, Steps
from rollpipe.pipes.taps import Meter, Throughput

pytestmark = pytest.mark.timeout(300)


class FromNumpy(gym.Env):
    "Draws from numpy's global generator, also when it is made."

    observation_space = Box(-np.inf, np.inf, (4,))
    action_space = Discrete(5)

    def __init__(self):
        self.map = np.random.random(3)

    def reset(self, *, seed=None, options=None):
        return self.look(), {}

    def look(self):
        return np.random.random(4).astype(np.float32)

    def step(self, action):
        return self.look(), np.random.normal(), np.random.random() < 0.1, False, {}


def normalized():
    return gym.wrappers.NormalizeObservation(gym.wrappers.TimeLimit(Lively(), 7))


def gaussian():
    return GaussianPolicy.for_env(SPACES, hidden=(8,), seed=0)


# --- single pipes


def cart():
    return CategoricalPolicy.for_env(
        (CartPole.observation_space, CartPole.action_space), hidden=(4,), seed=0
    )


# --- whole pipelines


def scaled(lanes):
    return _recipe(
        actor := gaussian(),
        critic=Critic.for_env(SPACES, seed=0),
        reward_scale="learn",
        lanes=lanes,
    )[0], actor


def above_lanes(lanes):
    return _recipe(
        gaussian(), rollouts, lanes=lanes, edits=[RewardScaler.inserter(after=FragmentCollector)]
    )


def rests(lanes):
    return _recipe(gaussian(), rollouts, lanes=lanes, sticky=True)


def infos(lanes):
    return _recipe(gaussian(), rollouts, LateInfos, lanes=lanes)


def wrapped(lanes):
    return _recipe(gaussian(), rollouts, normalized, lanes=lanes)


def numpy_env(lanes):
    return _recipe(Plain(), rollouts, FromNumpy, lanes=lanes)


def several(lanes):
    return _recipe(gaussian(), rollouts, [Lively, LateInfos], lanes=lanes)


def onnx(lanes):
    return _recipe(gaussian(), rollouts, lanes=lanes, engine="onnxruntime")


def onnx_memory(lanes):
    return _recipe(
        RecurrentPolicy.for_env(SPACES, hidden=(5,), memory=6, past=True, seed=1),
        rollouts,
        lanes=lanes,
        engine="onnxruntime",
    )


def stacked(lanes):
    return _above(
        Images,
        WORLDS["frames"](1)[1],
        lanes,
        lambda p: Minibatcher(FrameStack(FragmentCollector(p, 5), 3), 4),
    )


def stacked_steps(lanes):
    return _above(
        Images,
        WORLDS["frames"](1)[1],
        lanes,
        lambda p: Steps(FrameStack(FragmentCollector(p, 5), 3)),
    )


def of_tensors(lanes):
    return _recipe(cart(), rollouts, CartPole, lanes=lanes)


MORE = dict(
    scaled=scaled,
    above_lanes=above_lanes,
    rests=rests,
    infos=infos,
    wrapped=wrapped,
    numpy_env=numpy_env,
    several=several,
    onnx=onnx,
    onnx_memory=onnx_memory,
    stacked=stacked,
    stacked_steps=stacked_steps,
    of_tensors=of_tensors,
)
ALL = {
    **{name: world for name, world in WORLDS.items() if name not in ("finite", "unequal")},
    **MORE,
}


@pytest.mark.slow_but_one
@pytest.mark.parametrize("name", ALL)
def test_a_pipeline_goes_on(name):
    if name.startswith("onnx"):
        pytest.importorskip("onnxruntime")
    resumes(ALL[name], 5, cuts=[2, 3])


SERVICES = dict(
    none=lambda **options: None,
    one=partial(ProcessReading, 1),
    two=partial(ProcessReading, 2),
    spawned=partial(ProcessReading, 1, start_method="spawn"),
)


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "name, services",
    [
        ("scaled", ["none", "two", "one"]),
        ("recurrent", ["two", "none", "one"]),
        ("wrapped", ["one", "two", "none"]),
        ("infos", ["two", "one", "none"]),
        ("frames", ["two", "none", "two"]),
        ("episodes", ["one", "none", "two"]),
        ("global_env", ["two", "none", "one"]),
        ("vector", ["one", "two", "none"]),
        ("global_generator", ["two", "spawned", "none"]),
        ("stacked", ["two", "one", "none"]),
        ("of_tensors", ["two", "none", "one"]),
    ],
)
@pytest.mark.parametrize("lag", [0, 1])
def test_the_number_of_workers_changes(name, services, lag):
    "A part of two batches with each service, after a part of one batch with the first one."
    whole, _ = part(ALL[name], 7, service=ProcessReading(2, lag=lag) if lag else None, lanes=3)
    found, state = part(
        ALL[name], 1, service=SERVICES[services[0] if not lag else "two"](lag=lag), lanes=3
    )
    for service in services:
        if lag and service in ("none", "spawned"):
            service = "one"
        more, state = part(ALL[name], 2, len(found), state, SERVICES[service](lag=lag), lanes=3)
        found += more
    assert_same(whole, found)


def without_lanes(lanes):
    return FragmentCollector(EnvStepper(Lively, mine := Shaky(), 2, seed=1), 4), mine


def test_without_lanes_in_a_worker():
    "A state without `Lanes` fits one worker, whose lane goes on from it; with more, there would be several lanes."
    whole, _ = part(without_lanes, 5)
    first, state = part(without_lanes, 2)
    assert_same(whole, first + part(without_lanes, 3, 2, state, ProcessReading(1))[0])
    with pytest.raises(
        CheckpointError,
        match=r"one state cannot be that of several lanes. Expected `Lanes`.*got num_workers=2",
    ):
        part(without_lanes, 3, 2, state, ProcessReading(2))


def single_items(lanes):
    return Lanes(FragmentCollector(EnvStepper(Lively, mine := Shaky(), 2), 4), lanes, 1), mine


@pytest.mark.parametrize("workers", [0, 1])
def test_what_was_collected_ahead_is_handed_out_over_several_parts(workers):
    "Two items wait in the state; each of the next parts takes one item."
    whole, _ = part(single_items, 7, service=ProcessReading(2, lag=2), lanes=3)
    found, state = part(single_items, 2, service=ProcessReading(2, lag=2), lanes=3)
    waiting = [len(state[0]["Lanes"]["pending"])]
    while len(found) < 4:
        one, state = part(
            single_items,
            1,
            len(found),
            state,
            ProcessReading(1, lag=2) if workers else None,
            lanes=3,
        )
        waiting.append(len(state[0]["Lanes"]["pending"]))
        found += one
    assert_same(whole[:4], found)
    assert waiting == ([2, 2, 2] if workers else [2, 1, 0])


class Ends(Pipe):
    "Lane k gives 2 k + 1 items."

    lane = 0

    def set_lane(self, lane, seed):
        self.lane = lane

    def stream(self, items):
        kept = self.keep(n=0)
        while kept["n"] < 2 * self.lane + 1:
            kept["n"] += 1
            yield next(items)


def ending(lanes):
    return _above(Counting, Plain(), lanes, lambda p: Ends(FragmentCollector(p, 3)))


@pytest.mark.slow_but_one
@pytest.mark.parametrize("service", ["none", "one", "two"])
def test_lanes_that_have_ended(service):
    whole, _ = part(ending, 9, lanes=3)
    for k in (1, 4, 5, 8):
        first, state = part(ending, k, service=SERVICES[service](), lanes=3)
        assert_same(whole, first + part(ending, 9 - k, k, state, SERVICES[service](), lanes=3)[0])
    with pytest.raises(StopIteration):
        part(ending, 2, 8, state, SERVICES[service](), lanes=3)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("k", [2, 8])
def test_lanes_whose_end_was_collected_ahead(k):
    "A lane that has ended does not begin anew. After 8 items, all lanes have ended, and one item waits."
    ahead = partial(ProcessReading, 1, lag=3)
    whole, _ = part(ending, 9, service=ahead(), lanes=3)
    first, state = part(ending, k, service=ahead(), lanes=3)
    assert_same(whole, first + part(ending, 9 - k, k, state, ahead(), lanes=3)[0])
    for service in (ahead(), None):
        assert len(part(ending, 9 - k, k, state, service, lanes=3)[0]) == 9 - k
        with pytest.raises(StopIteration):
            part(ending, 10 - k, k, state, service, lanes=3)


def test_sinks_of_taps():
    "A sink with a state of its own goes on, and any other function sees each item once."
    seen = []
    metrics = []

    def world(lanes):
        pipe, mine = _above(Lively, Shaky(), lanes, lambda p: FragmentCollector(p, 5))
        meter = Meter(lambda end: dict(ret=end.ret))
        pipe = Throughput(
            Tap(
                EpisodeStats(EpisodeStats(pipe, seen.append), meter),
                meters := Meter(lambda f: dict(rew=f.state.rew.sum())),
            ),
            lambda rate: seen.append((rate.items, rate.steps)),
            every=3,
        )
        metrics.append((meter, meters))
        return pipe, mine

    part(world, 8)
    whole = seen.copy()
    mean = [meter.metrics() for meter in metrics[-1]]
    for k in (1, 4, 6):
        seen.clear()
        _, state = part(world, k)
        part(world, 8 - k, k, state)
        assert seen == whole and mean == [meter.metrics() for meter in metrics[-1]]


def test_the_time_of_a_rate_goes_on():
    "The seconds before the cut count, and those until the stream goes on do not."
    clock = count(step=0.5)
    told = []

    def rates(pipe):
        return Throughput(pipe, told.append, every=3, clock=lambda: next(clock))

    def make():
        pipe = rates(FragmentCollector(EnvStepper(Counting, Plain(), 2), 3))
        keep_environments(pipe)
        return pipe

    stream = iter(pipe := make())
    for _ in range(2):
        next(stream)
    state = stream_state(pipe)
    for _ in range(100):
        next(clock)
    next(iter(restore_stream(make(), state)))
    assert len(told) == 1 and told[0].items == 3 and 2 < told[0].seconds < 5


# --- what does not fit


def lanes_of(n_envs=2, n=2, actor=gaussian, source=Lively, wrap=lambda p: p):
    pipe = Lanes(wrap(FragmentCollector(EnvStepper(source, actor(), n_envs), 4)), n, 0)
    keep_environments(pipe)
    return pipe


def state_of(pipe, n=3):
    stream = iter(pipe)
    for _ in range(n):
        next(stream)
    return encoded(stream_state(pipe))


def refused(pipe, state, kind, match):
    with pytest.raises(kind, match=match):
        next(iter(restore_stream(pipe, state)))


def memory():
    return RecurrentPolicy.for_env(SPACES, hidden=(5,), memory=6, seed=1)


def test_a_state_of_something_else_is_refused():
    state = state_of(lanes_of())
    refused(
        lanes_of(n_envs=3),
        state,
        EnvError,
        r"EnvStepper, lane \d: the state is that of other environments. Expected 3 of them, got 2",
    )
    refused(
        lanes_of(n=3),
        state,
        CheckpointError,
        r"the state has other lanes. Expected \[0, 1, 2\], got \[0, 1\]",
    )
    refused(
        lanes_of(n=1),
        state,
        CheckpointError,
        r"the state has other lanes. Expected \[0\], got \[0, 1\]",
    )
    refused(
        lanes_of(actor=memory),
        state,
        EnvError,
        r"EnvStepper, lane \d: state has the wrong structure: missing state",
    )
    refused(
        lanes_of(source=normalized), state, PipeError, "the state does not fit this environment"
    )
    refused(
        FragmentStacker(lanes_of(), 2),
        dict(state, Other={}),
        CheckpointError,
        "lacks pipes that kept something. Expected Other, got",
    )
    lacking = dict(state["Lanes"], lanes={0: state["Lanes"]["lanes"][0]})
    refused(
        lanes_of(),
        {"Lanes": lacking},
        CheckpointError,
        r"the state has other lanes. Expected \[0, 1\], got \[0\]",
    )
    damaged = dict(
        state["Lanes"]["lanes"][1]["pipes"],
        EnvStepper=dict(state["Lanes"]["lanes"][1]["pipes"]["EnvStepper"], graph="[]"),
    )
    lanes = {**state["Lanes"]["lanes"], 1: dict(state["Lanes"]["lanes"][1], pipes=damaged)}
    refused(lanes_of(), {"Lanes": dict(state["Lanes"], lanes=lanes)}, EnvError, "damaged")


def test_a_state_of_another_class_is_refused():
    state = state_of(lanes_of(wrap=RewardScaler))

    class Renamed(Pipe):
        state_name = "RewardScaler"

        def stream(self, items):
            kept = self.keep(total=0)
            for item in items:
                yield item, kept

    refused(
        lanes_of(wrap=Renamed),
        state,
        CheckpointError,
        "the state is that of another pipe. Expected total, got moments, lanes",
    )

    class Silent(Pipe):
        state_name = "RewardScaler"

        def stream(self, items):
            yield from items

    refused(
        lanes_of(wrap=Silent),
        state,
        CheckpointError,
        "Silent keeps nothing, and got a state to go on from",
    )


def test_what_an_environment_draws_when_it_is_made_is_not_drawn_again():
    "By a lane that goes on: its generators have the state after that."

    def world():
        return Lanes(FragmentCollector(EnvStepper(FromNumpy, Plain(), 2), 5), 1, seed=0)

    pipe = world()
    new = world()
    ways = [keeper.name for keeper in keep_environments(pipe).values()]
    next(stream := iter(pipe))
    state = stream_state(pipe)
    expected = next(stream)
    keep_as(new, ways)
    assert_same(next(iter(restore_stream(new, state))), expected)


def test_what_is_no_plain_data_is_refused_when_it_is_told():
    class Clings(Pipe):
        def stream(self, items):
            self.keep(clock=count())
            yield from items

    pipe = Clings(IterableWrapper([1, 2]))
    stream = iter(pipe)
    next(stream)
    with pytest.raises(
        CheckpointError, match="Clings.*: a pipe keeps what is no plain data. Got itertools.count"
    ):
        stream_state(pipe)


@pytest.mark.parametrize(
    "make, why",
    [
        (lambda: ToDevice(lanes_of(), "cpu", ahead=1), "it has read 1 items ahead"),
        (
            lambda: EnvStepper(Counting, Plain()),
            "it was not tested whether its environments can be kept",
        ),
        (
            lambda: lanes_of(source=[Lively()], n_envs=None, n=1),
            "its environments cannot be kept .*lent",
        ),
        (lambda: IterableWrapper([1]), "a pipe of torch"),
    ],
)
def test_what_cannot_be_told_is_named(make, why):
    (found,) = unknown_states(make())
    assert re.search(why, found)


@pytest.mark.parametrize("options", [dict(lag=None), dict(lag=1, order="ready")])
def test_a_stream_that_depends_on_the_clock_is_named(options):
    with DataLoader2(lanes_of(), reading_service=ProcessReading(2, **options)) as loader:
        next(iter(loader))
        (found,) = unknown_states(loader.datapipe)
        assert re.match("WorkerLanes.*: its stream depends on the speed of its workers", found)


# --- workers that die


class Mortal(Lively):
    "Kills its worker at the `at`-th step, unless the file is there."

    def __init__(self, path, at):
        super().__init__()
        self.path = str(path)
        self.at = at
        self.steps = 0

    def step(self, action):
        self.steps += 1
        if (
            self.steps == self.at
            and current_process().name == "worker 1"
            and not os.path.exists(self.path)
        ):
            open(self.path, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def mortal(path, at):
    def world(lanes):
        return _above(
            lambda: Mortal(path, at),
            mine := memory(),
            lanes,
            lambda p: RewardScaler(FragmentCollector(p, 5)),
        )[0], mine

    return world


@pytest.mark.slow_but_one
@pytest.mark.parametrize("at", [1, 3, 9, 13])
@pytest.mark.parametrize("lag", [0, 2])
def test_a_restarted_worker_goes_on_where_it_was(at, lag, tmp_path, caplog):
    "It equals the stream without the fault, and so does what goes on from its state."
    whole, _ = part(
        mortal(tmp_path / "none", 10**9), 12, service=ProcessReading(2, lag=lag), lanes=3
    )
    world = mortal(tmp_path / "died", at)
    service = ProcessReading(2, lag=lag, restart=1)
    first, state = part(world, 9, service=service, lanes=3)
    assert (
        os.path.exists(tmp_path / "died")
        and "go on where they were (restart 1 of 1)" in caplog.text
    )
    assert_same(whole, first + part(world, 3, 9, state, ProcessReading(1, lag=lag), lanes=3)[0])


@pytest.mark.slow_but_one
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("restart", [0, 1])
def test_a_worker_that_dies_while_the_state_is_asked_for(lag, restart, tmp_path):
    whole, _ = part(
        mortal(tmp_path / "none", 10**9), 9, service=ProcessReading(2, lag=lag), lanes=3
    )
    pipe, actor = mortal(tmp_path / "none", 10**9)(3)
    keep_environments(pipe)
    found = []
    with DataLoader2(
        pipe, reading_service=ProcessReading(2, lag=lag, restart=restart, grace=0)
    ) as loader:
        items = iter(loader)
        service = loader.reading_service
        for k in range(9):
            found.append(snapshot(next(items)))
            change(actor)
            if k == 4:
                process = next(x for x in service.health() if x["worker"] == 1)["pid"]
                os.kill(process, signal.SIGKILL)
                if not restart:
                    with pytest.raises(WorkerError, match="worker 1"):
                        told(loader.datapipe)
                    return
                state = told(loader.datapipe)
        assert_same(whole, found)
        assert service.health()[0]["restarted"] == 1
    assert_same(
        whole,
        found[:5]
        + part(mortal(tmp_path / "none", 10**9), 4, 5, state, ProcessReading(1, lag=lag), lanes=3)[
            0
        ],
    )


def test_lanes_that_cannot_tell_are_named_and_go_on():
    pipe = Lanes(FragmentCollector(EnvStepper(Lively, Shaky()), 3), 2, 0)
    expected = [snapshot(x) for x, _ in zip(pipe, range(2))]
    with DataLoader2(pipe, reading_service=ProcessReading(1)) as loader:
        items = iter(loader)
        one = snapshot(next(items))
        with pytest.raises(
            CheckpointError, match="the lanes cannot tell their states. Got EnvStepper.*not tested"
        ):
            told(loader.datapipe)
        assert_same([one, snapshot(next(items))], expected)


# --- shapes


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 3),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(1, 4),
    st.booleans(),
    st.data(),
)
def test_any_shape_and_any_cuts(n_envs, n_steps, lanes, joined, stacks, data):
    n = 6
    merged = data.draw(st.booleans(), label="merged")

    def world(lanes):
        pipe = Lanes(
            RewardScaler(
                FragmentCollector(EnvStepper(LateInfos, mine := memory(), n_envs), n_steps)
            ),
            lanes,
            7,
        )
        pipe = FragmentStacker(pipe, joined) if stacks else Fragments(Steps(pipe), joined)
        return StepMerger(Steps(pipe), joined) if merged else pipe, mine

    whole, _ = part(world, n, lanes=lanes)
    found = []
    state = None
    for k in [*sorted(data.draw(st.sets(st.integers(1, n - 1)), label="cuts")), n]:
        more, state = part(world, k - len(found), len(found), state, lanes=lanes)
        found += more
    assert_same(whole, found)
