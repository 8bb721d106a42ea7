"""Laws of all public pipes: how they are copied, edited, closed, interrupted and continued, whatever they do with their items.

A new pipe of the package needs a row in `PIPES`, or a reason in `NO_ROW`.
"""

import gc
import importlib
import inspect
import math
import pickle
import pkgutil
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from forked import run_forked
from reference import assert_same, snapshot
from resuming import resumes
from tensor_worlds import CartPole, Planned
from toys import (
    Acts,
    Brief,
    Counting,
    Failing,
    Ledger,
    Limit,
    Lively,
    Memory,
    Scripted,
    Shaky,
    sampled,
)

import rollpipe
from rollpipe.agents.intrinsic import RND, Distillation
from rollpipe.layers import CategoricalPolicy, Critic, GaussianPolicy, QPolicy
from rollpipe.pipes import (
    AdvantageBuffer,
    CheckInvariants,
    DataError,
    EnvStepper,
    EpisodeCollector,
    EpisodeStats,
    FragmentCollector,
    FragmentStacker,
    FrameStack,
    Lanes,
    Minibatcher,
    NStep,
    ObservationCast,
    Pipe,
    ProcessReading,
    Recorder,
    Replay,
    Replayer,
    RewardScaler,
    StepMerger,
    Tap,
    ToDevice,
    draw,
    find,
    insert_after,
    insert_before,
    on_policy,
    remove,
    replace,
    replayed,
)
from rollpipe.pipes.data.fragment import Tick
from rollpipe.pipes.envs.sources import Acting
from rollpipe.pipes.graph.edits import copy_graph, inputs, nodes
from rollpipe.pipes.graph.pipe import stream_state, unknown_states
from rollpipe.pipes.graph.torchdata import (
    DataLoader2,
    InProcessReadingService,
    IterableWrapper,
    IterDataPipe,
    traverse_dps,
)
from rollpipe.pipes.passes import keep_environments
from rollpipe.pipes.profiling.clock import Timed
from rollpipe.pipes.recording.data_sampler import DataSampler, Recording
from rollpipe.pipes.steps import Fragments, Steps
from rollpipe.pipes.taps import Throughput
from rollpipe.pipes.tensors.collector import TensorCollector
from rollpipe.testing import PIPE_RESUMABLE, check_pipe
from rollpipe.testing.tasks import BitFlip

SPACES = Lively.observation_space, Lively.action_space


# --- what the pipes read


Pictures = partial(  # random ones
    Scripted, observation_space=gym.spaces.Box(0, 255, (2, 3), np.uint8), see=sampled
)


class LateInfos(Lively):
    "The first episodes have no infos, and the dtype of one grows."

    def step(self, action):
        *answer, _ = super().step(action)
        self.count = getattr(self, "count", 0) + 1
        info = {"count": self.count}
        if self.count >= 15:
            info["late"] = 1 if self.count < 40 else 0.5
        if self.count % 11 == 0:
            info["rare"] = np.float32([1, 2])
        return *answer, info


def gaussian():
    return GaussianPolicy.for_env(SPACES, hidden=(8,), seed=0)


def critic():
    return Critic.for_env(SPACES, hidden=(8,), seed=0)


def ticks(env=Lively, actor=gaussian, **options):
    return EnvStepper(lambda: env(), actor(), 2, seed=1, **options)


def fragments(*args, n_steps=5, **options):
    return FragmentCollector(ticks(*args, **options), n_steps)


def lanes(*args, **options):
    return Lanes(fragments(*args, **options), 2)


def recorded(folder):
    "The folder of a recording of six fragments."
    if not folder.exists():
        for _ in islice(Recorder(fragments(), folder), 6):
            pass
    return folder


def nothing(item):
    pass


class Drawn(Pipe):
    "The samples of each item, in a list."

    reads = 1

    def stream(self, items):
        for item in items:
            yield item.fresh, list(item.samples)


def itself(pipe):
    return pipe.pipe if isinstance(pipe, Drawn) else pipe


# --- the registry


class Row(NamedTuple):
    "How a pipe is made, and what it promises."

    make: Callable  # a folder of the test -> the pipe with its sources, always an equal one
    one_for_one: bool = False  # each item that it reads makes one that it yields
    takes_anything: bool = False  # it refuses no item
    learns: bool = False  # it goes on learning when it is iterated again
    no_envs: bool = False  # no environment of its graph writes into the `Ledger`
    above_lanes: bool = True  # a lane may have it
    goes_on_alone: bool = True  # its own state is enough to go on from, if its input goes on
    tells_all: bool = True  # the state of its graph is all that it goes on from


each = partial(Row, one_for_one=True)
PIPES = {
    "EnvStepper": Row(lambda folder: ticks()),
    "EnvStepper, global generator": Row(lambda folder: ticks(actor=Shaky)),
    "FragmentCollector": Row(lambda folder: fragments(n_steps=3)),
    "FragmentCollector, resting": Row(lambda folder: fragments(n_steps=8, sticky=4)),
    "EpisodeCollector": Row(lambda folder: EpisodeCollector(ticks(Brief), 2)),
    "EpisodeCollector, padded": Row(
        lambda folder: EpisodeCollector(ticks(LateInfos, terminal_obs=True), 2, pad=True)
    ),
    "EpisodeCollector, memory": Row(
        lambda folder: EpisodeCollector(ticks(Counting, Memory, terminal_obs=True))
    ),
    "Lanes": Row(lambda folder: lanes(), takes_anything=True, above_lanes=False),
    "AdvantageBuffer": each(lambda folder: AdvantageBuffer(lanes(), critic())),
    "FragmentStacker": Row(lambda folder: FragmentStacker(lanes(), 2)),
    "Minibatcher": Row(lambda folder: Minibatcher(lanes(n_steps=3), 4, 2, seed=3)),
    "Minibatcher, columns": Row(lambda folder: Minibatcher(lanes(Counting, Memory), 4, 2, seed=5)),
    "ToDevice": each(lambda folder: ToDevice(fragments(), "cpu"), takes_anything=True),
    "ToDevice, ahead": each(
        lambda folder: ToDevice(fragments(), "cpu", ahead=1),
        takes_anything=True,
        tells_all=False,
    ),
    "CheckInvariants": each(
        lambda folder: CheckInvariants(AdvantageBuffer(lanes(), critic()), rate=0.6)
    ),
    "Tap": each(lambda folder: Tap(lanes(), nothing), takes_anything=True),
    "EpisodeStats": each(lambda folder: EpisodeStats(lanes(), nothing)),
    "Throughput": each(lambda folder: Throughput(lanes(), nothing, every=2)),
    "RewardScaler": each(lambda folder: RewardScaler(lanes(), gamma=0.9)),
    "RewardScaler, ticks": each(lambda folder: RewardScaler(ticks(actor=Shaky))),
    "RewardScaler, above lanes": each(
        lambda folder: Lanes(RewardScaler(fragments(), gamma=0.9), 2), above_lanes=False
    ),
    "RewardScaler, batches": each(lambda folder: RewardScaler(FragmentStacker(lanes(), 2))),
    "ObservationCast": each(lambda folder: ObservationCast(fragments(), torch.float64)),
    "NStep": each(lambda folder: NStep(fragments(), 3)),
    "FrameStack": each(lambda folder: FrameStack(fragments(Pictures, Acts), 3)),
    "FrameStack, batches": each(
        lambda folder: FrameStack(FragmentStacker(lanes(Pictures, Acts), 2), 4)
    ),
    "Steps": Row(lambda folder: Steps(fragments(n_steps=1))),
    "Steps, batches": Row(lambda folder: Steps(FragmentStacker(lanes(n_steps=1), 2))),
    "Fragments": Row(lambda folder: Fragments(Steps(lanes()), 3)),
    "StepMerger": Row(lambda folder: StepMerger(Steps(lanes()), 3)),
    "Replay": each(
        lambda folder: Drawn(Replay(lanes(), 60, 5, warmup=12, seed=0)),
        above_lanes=False,
        goes_on_alone=False,
    ),
    "Hindsight": each(
        lambda folder: Drawn(flipped()), no_envs=True, above_lanes=False, goes_on_alone=False
    ),
    "DataSampler": Row(
        lambda folder: DataSampler(Replayer(recorded(folder / "played")), 5, seed=2),
        no_envs=True,
        above_lanes=False,
        goes_on_alone=False,
    ),
    "Recorder": each(
        lambda folder: Recorder(fragments(), folder / "made", append=True), takes_anything=True
    ),
    "Replayer": Row(
        lambda folder: Replayer(recorded(folder / "played")), no_envs=True, above_lanes=False
    ),
    "Recording": Row(
        lambda folder: Recording(recorded(folder / "played")), no_envs=True, above_lanes=False
    ),
    "Timed": each(lambda folder: Timed(fragments()), takes_anything=True),
    "RND": each(
        lambda folder: RND(
            lanes(terminal_obs=True), Distillation.for_env(SPACES, hidden=(4,), seed=0)
        ),
        learns=True,
        above_lanes=False,
    ),
    "TensorCollector": Row(
        lambda folder: TensorCollector(lambda: Planned(PLANS), Memory(), 5, seed=0),
        no_envs=True,
    ),
    "TensorCollector, lanes": Row(
        lambda folder: Lanes(TensorCollector(CartPole, cart(), 5, 3), 2, 1),
        no_envs=True,
        above_lanes=False,
    ),
    "a recipe": Row(
        lambda folder: on_policy(
            lambda: Lively(), gaussian(), critic(), n_envs=2, n_steps=3, lanes=2, seed=1
        ),
        above_lanes=False,
    ),
}
PLANS = [[(3, "term"), (4, "trunc")], [(1, "trunc"), (2, "both")], [(5, "trunc")]]
NO_ROW = {
    "Pipe": "the base",
    "Source": "the base",
    "WorkerLanes": "a reading service makes it; see `test_contract`",
    "MinariSource": "it reads files of h5py; see `test_minari`",
    "from_minari": "it reads files of h5py; see `test_minari`",
}


def flipped():
    actor = QPolicy.for_env(partial(BitFlip, 4), hidden=(8,), seed=0)
    options = dict(n_envs=2, n_steps=3, lanes=2, seed=0, capacity=90, batch_size=5, warmup=30)
    return replayed(partial(BitFlip, 4), actor, n_sampled_goal=4, **options)


def cart():
    spaces = CartPole.observation_space, CartPole.action_space
    return CategoricalPolicy.for_env(spaces, hidden=(4,), seed=0)


def public_pipes():
    "The names of all public classes of the package that are pipes."
    names = set()
    for module in pkgutil.walk_packages(rollpipe.__path__, "rollpipe."):
        if module.name.endswith("__main__"):
            continue
        for name, x in vars(importlib.import_module(module.name)).items():
            is_own = inspect.isclass(x) and x.__module__ == module.name and name[0] != "_"
            if is_own and issubclass(x, IterDataPipe):
                names.add(name)
    return names


def test_every_public_pipe_has_a_row():
    rows = {name.partition(",")[0] for name in PIPES} - {"a recipe"} | set(NO_ROW)
    lacking = public_pipes() - rows
    assert not lacking, f"add a row to `PIPES` of {__file__}: how is {sorted(lacking)} made?"
    assert not rows - public_pipes()


@pytest.fixture(params=PIPES)
def row(request):
    return PIPES[request.param]


@pytest.fixture
def make(row, tmp_path):
    "Makes the pipe, always an equal one."
    return partial(row.make, tmp_path)


@pytest.fixture
def again(row):
    "Skips a pipe that yields other items when it is iterated again."
    if row.learns:
        pytest.skip("it goes on learning")


def take(pipe, n=4):
    return [frozen(x) for x in islice(pipe, n)]


def frozen(item):
    return snapshot(item[:10] if isinstance(item, Tick) else item)


def is_source(pipe):
    return not inputs(pipe)


class Same(Pipe):
    "Passes items on, and promises nothing."

    def stream(self, items):
        yield from items


# --- items


@pytest.mark.parametrize("n", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_the_rules_of_the_contract(row, make, again, n):
    "Equal seeds, copies, and cuts give equal items; items do not change later; an iteration closes what it opened."
    violations = check_pipe(make, n_items=n, raises=False)
    if not row.goes_on_alone:
        violations = [x for x in violations if x.rule != PIPE_RESUMABLE]
    assert violations == []


@pytest.mark.slow_but_one
def test_a_whole_graph_goes_on_after_each_item(row, make):
    "Bit for bit, while the actor learns, through the encoding of a checkpoint."

    def world(lanes):
        pipe = make()
        actors = [source.actor for source in find(pipe, Acting)]
        return pipe, (actors or [torch.nn.Module()])[0]

    pipe = make()
    keep_environments(pipe)
    assert bool(unknown_states(pipe)) != row.tells_all
    if find(pipe, Recorder):
        pytest.skip("all worlds would write one folder; test_recording.py has this law")
    if row.tells_all:
        resumes(world, min(7, len(take(make(), 7))))


@pytest.mark.slow_but_one
def test_a_graph_of_derived_classes_tells_its_state(row, make):
    "The attributes that our classes change while they are iterated are not taken for state of a user's class."
    pipe = make()
    keep_environments(pipe)
    if unknown_states(pipe):
        pytest.skip("its class itself does not tell all")
    for node in nodes(pipe):
        if isinstance(node, Pipe):
            node.__class__ = type(type(node).__name__, (type(node),), {"__module__": "mine"})
    with closing(iter(pipe)) as items:
        for _ in islice(items, 4):
            stream_state(pipe)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_make_no_difference(row, make, again, workers):
    def seam():
        pipe = make()
        return Lanes(pipe, 2) if row.above_lanes and not find(pipe, Lanes) else pipe

    if not find(seam(), Lanes):
        pytest.skip("no lane has it")

    if workers and isinstance(make(), EnvStepper):
        pytest.skip("ticks carry gradients of the actor, which workers refuse to send")
    expected = take(seam(), 5)
    with DataLoader2(seam(), reading_service=ProcessReading(workers)) as loader:
        assert_same(take(loader, 5), expected)


def test_loaders_and_further_iterations_give_the_same(make, again):
    "A loader keeps alive what its copy of the graph needs."
    pipe = make()
    expected = take(pipe)
    for service in (None, InProcessReadingService()):
        with DataLoader2(make(), reading_service=service) as loader:
            gc.collect()
            assert_same(take(loader), expected)
            assert_same(take(loader), expected)
    assert_same(take(pipe), expected)


def test_it_is_pickled_before_within_and_after_an_iteration(make, again):
    "By standard pickle, with lambdas as factories."
    pipe = make()
    early = [pickle.dumps(pipe, protocol) for protocol in (2, pickle.HIGHEST_PROTOCOL)]
    expected = take(pipe)
    stream = iter(pipe)
    next(stream)
    within = pickle.dumps(pipe)
    del stream
    for text in (*early, within, pickle.dumps(pipe)):
        assert_same(take(pickle.loads(text)), expected)


CHILD = """
import pickle, sys
from test_laws_of_pipes import take
with open(sys.argv[1], "rb") as file: pipes = pickle.load(file)
with open(sys.argv[1], "wb") as file: pickle.dump({name: take(p) for name, p in pipes.items()}, file)
"""


@pytest.mark.parametrize("names", [["Lanes"], pytest.param(PIPES, marks=pytest.mark.slow)])
def test_another_process_gets_working_copies(names, tmp_path):
    "Lambdas, and environments and actors made in this very function, included; and weights as they are now."

    class LocalEnv(Lively):
        observation_space = Lively.observation_space

    class LocalActor(Shaky):
        def forward(self, *args, **kwargs):
            act, hx, info = super().forward(*args, **kwargs)
            return act * 0.5, hx, {**info, "own": act * 2}

    pipes = {}
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        if not PIPES[name].learns:
            pipes[name] = PIPES[name].make(folder)
    envs = [lambda: LocalEnv(), LocalEnv]
    pipes["local"] = FragmentCollector(EnvStepper(envs, LocalActor(), 2, seed=4), 5)
    trained = gaussian()
    with torch.no_grad():
        trained.head.log_std.add_(1)
    pipes["trained"] = FragmentCollector(EnvStepper(Lively, trained, 2, seed=4), 5)

    file = tmp_path / "pipes"
    file.write_bytes(pickle.dumps(pipes))
    done = run_forked(["-c", CHILD, file], cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    items_of = pickle.loads(file.read_bytes())
    for name, pipe in pipes.items():
        assert_same(items_of[name], take(pipe))


def test_a_new_iterator_ends_the_older_one(make):
    pipe = make()
    old = iter(pipe)
    next(old)
    new = iter(pipe)
    next(new)
    with pytest.raises(RuntimeError):
        next(old)
    del old
    next(new)


def test_a_length_or_the_reason_why_there_is_none(row, make):
    "A pipe that yields one item for each that it reads has the length of its input."

    class Three(Pipe):
        reads = 1

        def __len__(self):
            return 3

    pipe = itself(make())
    with pytest.raises(TypeError, match=f"^{type(pipe).__name__} has no length: .*"):
        len(pipe)
    assert pipe  # though it has no length
    if is_source(pipe) or isinstance(pipe, Lanes):
        return
    pipe = insert_after(pipe, lambda x: x is inputs(pipe)[0], Three)
    if row.one_for_one:
        assert len(pipe) == 3
    else:
        with pytest.raises(TypeError, match="has no length"):
            len(pipe)


def test_an_item_of_another_kind_is_refused_by_name(row, make):
    pipe = itself(make())
    if row.takes_anything or is_source(pipe) or isinstance(pipe, Lanes):
        return
    name = type(pipe).__name__
    edited = replace(pipe, lambda x: x is inputs(pipe)[0], IterableWrapper([3]))
    with pytest.raises(DataError, match=f"^{name}.*[Ee]xpected"):
        list(edited)


OUT_OF_RANGE = [  # a pipe, its arguments, and what the message says of the last one
    (Tap, dict(see=None), "see"),
    (EpisodeStats, dict(sink=3), "sink"),
    (Throughput, dict(sink=[]), "sink"),
    (Throughput, dict(sink=print, every=0), "every"),
    (CheckInvariants, dict(rate=2), "rate"),
    (FrameStack, dict(n=0), "n=0"),
    (NStep, dict(n=0), "n=0"),
    (NStep, dict(n=1.5), "n=1.5"),
    (NStep, dict(n=3, gamma=2), "gamma=2"),
    (RewardScaler, dict(gamma=-1), "gamma=-1"),
    (RewardScaler, dict(clip=0), "clip"),
    (RewardScaler, dict(scale="sing"), "sing"),
    (RewardScaler, dict(scale=math.nan), "nan"),
    (RewardScaler, dict(scale=math.inf), "inf"),
    (ObservationCast, dict(dtype="float32"), "floating torch.dtype"),
    (ObservationCast, dict(dtype=np.float32), "floating torch.dtype"),
    (ToDevice, dict(device="cpu", ahead=-1), "ahead=-1"),
    (FragmentCollector, dict(n_steps=0), "n_steps=0"),
    (FragmentStacker, dict(n=0), "n=0"),
    (FragmentStacker, dict(n=None), "n=None"),
    (Minibatcher, dict(size=0), "size=0"),
    (Minibatcher, dict(size=3, epochs="2"), "epochs='2'"),
    (EpisodeCollector, dict(batch=True), "batch=True"),
    (Lanes, dict(n=1.5), "n=1.5"),
    (AdvantageBuffer, dict(gamma=1.1), "gamma=1.1"),
    (AdvantageBuffer, dict(lam=math.nan), "lam=nan"),
    (Fragments, dict(n_steps=2.0), "n_steps=2.0"),
    (StepMerger, dict(n=0), "n=0"),
    (StepMerger, dict(n=2, gamma=-0.1), "gamma=-0.1"),
    (StepMerger, dict(n=2, gamma=math.nan), "gamma=nan"),
]


@pytest.mark.parametrize("cls, arguments, text", OUT_OF_RANGE)
def test_an_argument_out_of_range_is_named(cls, arguments, text):
    with pytest.raises(DataError, match=f"^{cls.__name__}.*Expected") as caught:
        cls(IterableWrapper([]), **arguments)
    assert text in str(caught.value)


# --- the graph


def test_a_graph_is_seen_as_torch_sees_it(make):
    def ids(graph):
        found = set(graph)
        for _, above in graph.values():
            found |= ids(above)
        return found

    pipe = make()
    Ledger.clear()
    text = repr(pipe)
    assert type(pipe).__name__ in text and len(text) < 200
    assert text in str(draw(pipe))
    assert ids(traverse_dps(pipe)) == set(map(id, nodes(pipe)))
    iter(pipe)
    assert Ledger.made == []  # neither looking nor `iter` makes an environment


def drawing(pipe):
    "An edit may take a fusion apart."
    return str(draw(pipe)).replace(", in_place=True", "")


def test_a_pipe_can_be_inserted_anywhere_and_removed(make, again):
    "The graph is copied, the stream stays as it was, and what was removed leaves the first graph."
    pipe = make()
    text = drawing(pipe)
    expected = take(pipe)
    for at in nodes(pipe):
        edited = insert_after(pipe, lambda x, at=at: x is at, Same)
        assert not set(map(id, nodes(edited))) & set(map(id, nodes(pipe)))
        assert_same(take(edited), expected)
        shorter = remove(edited, Same)
        assert drawing(shorter) == text
        if inputs(at):
            edited = insert_before(pipe, lambda x, at=at: x is at, Same)
            assert_same(take(edited), expected)
    assert_same(take(shorter), expected)
    assert_same(take(copy_graph(pipe)), expected)
    assert drawing(pipe) == text


# --- ends


def left_at_once(pipe):
    for _ in pipe:
        break


def closed_twice(pipe):
    items = iter(pipe)
    next(items)
    items.close()
    items.close()


def closed_unread(pipe):
    left_at_once(pipe)
    iter(pipe).close()


def ended_below(pipe):
    assert len(list(Limit(pipe, 3))) == 3


def ended_above(pipe):
    list(insert_after(pipe, is_source, partial(Limit, n=12)))


def collected_in_a_cycle(pipe):
    "As the traceback of an exception that holds the frame in which it was caught."
    items = iter(pipe)
    next(items)
    cycle = [items]
    cycle.append(cycle)
    del items, cycle
    gc.collect()


def left_in_a_loader(pipe, service=None):
    with DataLoader2(pipe, reading_service=service) as loader:
        left_at_once(loader)


def iterated_again_in_a_loader(pipe):
    with DataLoader2(pipe) as loader:
        left_at_once(loader)
        n_open = Ledger.open()
        left_at_once(loader)
        assert Ledger.open() == n_open


def collected_loader(pipe):
    loader = DataLoader2(pipe)
    next(iter(loader))
    del loader
    gc.collect()


def failing_loop(pipe):
    for _ in pipe:
        raise ZeroDivisionError


def failing_loop_of_a_loader(pipe):
    with DataLoader2(pipe) as loader:
        failing_loop(loader)


def failing_below(pipe):
    list(Failing(pipe, 1))


def failing_function_below(pipe):
    list(pipe.map(divide).batch(2))


def divide(item):
    raise ZeroDivisionError("a function of the user")


def failing_above(pipe):
    list(insert_after(pipe, is_source, partial(Failing, n=3)))


def failing_in_a_loader(pipe):
    failing_loop_of_a_loader(Failing(pipe, 2))


ENDS = (
    left_at_once,
    closed_twice,
    closed_unread,
    ended_below,
    ended_above,
    collected_in_a_cycle,
    left_in_a_loader,
    partial(left_in_a_loader, service=InProcessReadingService()),
    iterated_again_in_a_loader,
    collected_loader,
)
FAILURES = (
    failing_loop,
    failing_loop_of_a_loader,
    failing_below,
    failing_function_below,
    failing_above,
    failing_in_a_loader,
)


def test_its_environments_are_closed_however_it_ends(row, make):
    if row.no_envs:
        pytest.skip("its environments do not tell")
    for end in ENDS:
        pipe = make()
        Ledger.clear()
        end(pipe)
        assert Ledger.made and Ledger.open() == 0, end


def test_its_environments_are_closed_when_something_fails(row, make):
    "While the traceback is held, and the pipe can be used again."
    for fail in FAILURES:
        pipe = make()
        Ledger.clear()
        with pytest.raises(ZeroDivisionError) as kept:
            fail(pipe)
        assert kept.tb and Ledger.open() == 0, fail
        assert Ledger.made or row.no_envs, fail
        next(iter(pipe))


class Accident(Pipe):
    "Fails at its fourth item."

    def stream(self, items):
        yield from islice(items, 3)
        raise DataError("an accident", pipe=self)


def test_an_error_of_a_pipe_above_names_that_pipe(make):
    pipe = make()
    edited = insert_after(pipe, is_source, Accident)
    with pytest.raises(DataError, match="^Accident.*an accident") as caught:
        list(edited)
    assert caught.value.pipe == "Accident"
