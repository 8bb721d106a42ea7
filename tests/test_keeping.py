"""The ways to keep a running environment: each is exact or refused, and what a capture says is never executed."""

import array
import ctypes
import datetime
import enum
import functools
import itertools
import json
import os
import pickle
import queue
import random
import shutil
import tempfile
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PureWindowsPath
from types import ModuleType
from types import SimpleNamespace as Thing

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import wrappers
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rollpipe.pipes import nested
from rollpipe.pipes.data.captures import capture
from rollpipe.pipes.data.encoding import decode, encode
from rollpipe.pipes.data.errors import EnvError
from rollpipe.pipes.data.leaves import plain_class
from rollpipe.pipes.data.restoring import restore
from rollpipe.pipes.data.simulators import name_of
from rollpipe.pipes.envs.factories import EnvFactory, env_factories
from rollpipe.pipes.envs.keeping import Keeper, KeptEnv, bits_of, keeper_for
from rollpipe.pipes.envs.vector import env_batch
from rollpipe.pipes.tensors.tensor_env import TensorEnv

Point = namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED, BLUE = 1, 2


class Slim:
    __slots__ = "a", "b"


class World(gym.Env):
    "Walks at random until it is far from 0. Subclasses hold their state in other ways."

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = 0.0
        self.begin()
        return np.float32([self.x]), {}

    def begin(self):
        pass

    def noise(self):
        return self.np_random.normal()

    def step(self, action):
        self.x += 2 * action - 1 + self.noise()
        return (
            np.float32([self.x]),
            float(self.x),
            bool(abs(self.x) > 6),
            False,
            {"noise": self.x**2, "name": "x"},
        )


def stored(state):
    "The state as it comes out of a checkpoint."
    tensors = {}
    return decode(json.loads(json.dumps(encode(state, tensors), allow_nan=False)), tensors)


def check(make, *names, seed=0):
    "Keep an environment, after more steps than the test of `keeper_for` takes, and go on in a new one, twice."
    keeper = keeper_for(make, seed)
    assert keeper.name in names, (keeper, keeper.failed)
    running = KeptEnv(make(), keeper)
    running.do("reset", dict(seed=seed + 5))
    running.env.action_space.seed(7)
    running.play(running.env.action_space.sample, 300, 111, np.inf)
    for _ in range(2):
        state = stored(running.kept.state())
        new = KeptEnv(make(), keeper)
        new.kept.restore(state)
        done = running.play(running.env.action_space.sample, 100, 50, np.inf)
        new.repeat(done)
        running.env.close()
        running = new
    running.env.close()
    return keeper


CLASSIC = [
    "CartPole-v1",
    "Pendulum-v1",
    "Acrobot-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "Taxi-v4",
    "FrozenLake-v1",
    "CliffWalking-v1",
    "Blackjack-v1",
]
MUJOCO = [
    f"{name}-v5" for name in ("HalfCheetah", "Hopper", "Walker2d", "Swimmer", "Ant", "Humanoid")
]


@pytest.mark.slow_but_one
@pytest.mark.parametrize("name", CLASSIC)
def test_classic_environments_are_kept_by_their_attributes(name):
    assert check(lambda: gym.make(name), "attributes").failed == {}


@pytest.mark.parametrize("name", MUJOCO)
def test_mujoco_is_kept_by_its_arrays(name):
    pytest.importorskip("mujoco")
    assert check(lambda: gym.make(name), "MuJoCo").failed == {}


def test_box2d_is_kept_by_what_was_done():
    pytest.importorskip("Box2D")
    assert "attributes" in check(lambda: gym.make("LunarLander-v3"), "replay (episode)").failed
    assert "replay (episode)" in check(lambda: gym.make("BipedalWalker-v3"), "replay (all)").failed


@pytest.mark.parametrize("sticky, name", [(0.0, "ALE"), (0.25, "replay (episode)")])
def test_the_atari_emulator_is_kept_by_its_own_state_unless_it_may_repeat_an_action(sticky, name):
    ale_py = pytest.importorskip("ale_py")
    _ = pytest.importorskip("cv2")
    gym.register_envs(ale_py)

    def make():
        return wrappers.AtariPreprocessing(
            gym.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=sticky)
        )

    check(lambda: wrappers.FrameStackObservation(make(), 4), name)


WRAPPERS = [
    wrappers.NormalizeObservation,
    wrappers.NormalizeReward,
    wrappers.RecordEpisodeStatistics,
    lambda env: wrappers.FrameStackObservation(env, 3),
    lambda env: wrappers.TimeLimit(env, 7),
    wrappers.TimeAwareObservation,
    lambda env: wrappers.DelayObservation(env, 2),
    lambda env: wrappers.StickyAction(env, 0.3),
]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("name", ["CartPole-v1", "Hopper-v5"])
def test_wrappers_are_kept_too(wrap, name):
    if name == "Hopper-v5":
        pytest.importorskip("mujoco")
    check(lambda: wrap(gym.make(name)), "attributes", "MuJoCo")


@pytest.mark.parametrize("mode", ["SameStep", "NextStep", "Disabled"])
def test_a_vector_is_kept_as_one(mode):
    check(
        lambda: gym.make_vec("CartPole-v1", 3, "sync", vector_kwargs=dict(autoreset_mode=mode)),
        "attributes",
    )


def test_ends_that_are_numbers():
    class Numbers(gym.Wrapper):
        def step(self, action):
            obs, rew, *ends, info = self.env.step(action)
            return obs, rew, *map(float, ends), info

    check(lambda: Numbers(gym.make("CartPole-v1")), "attributes")


def test_vectors_of_their_own_class_are_kept_and_processes_are_not():
    check(lambda: gym.make_vec("CartPole-v1", 3, "vector_entry_point"), "attributes")
    keeper = keeper_for(
        lambda: wrappers.vector.RecordEpisodeStatistics(gym.make_vec("CartPole-v1", 2, "async"))
    )
    assert (keeper.name, keeper.failed) == (
        "none",
        {"processes": "AsyncVectorEnv keeps its environments out of reach"},
    )


class Tensors(TensorEnv):
    n_envs, device = 3, "cpu"
    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.memory = torch.zeros(3, 3)
        self.obs = self.memory[:, :2]
        self.age = self.memory[:, 2]
        return self.obs

    def step(self, act):
        self.obs += act[:, None] + torch.randn(3, 2, generator=self.generator)
        self.age += 1
        trunc = self.age > 5
        final = self.obs.clone()
        self.memory[trunc] = 0
        return (
            self.obs,
            act.float(),
            torch.zeros(3, dtype=torch.bool),
            trunc,
            final,
            {"age": self.age},
        )


def test_tensors_are_kept_as_they_share_memory():
    assert keeper_for(Tensors).name == "attributes"
    env = Tensors()
    new = Tensors()
    env.reset(3)
    env.step(torch.ones(3, dtype=torch.int64))
    Keeper("attributes").begin(new).restore(stored(Keeper("attributes").begin(env).state()))
    assert (
        new.memory.untyped_storage().data_ptr()
        == new.obs.untyped_storage().data_ptr()
        == new.age.untyped_storage().data_ptr()
    )
    left = torch.zeros(3, dtype=torch.int64)
    for x, y in zip(env.step(left)[:2], new.step(left)[:2]):
        assert torch.equal(x, y)


# -- hostile environments ---------------------------------------------------------------------------------------------


class GlobalNoise(World):
    "Draws from the global generators, whose states each lane swaps in: they are not the environment's."

    def noise(self):
        return np.random.normal() + random.random() + torch.rand(()).item()


class OwnNoise(World):
    "Has a generator of its own, which no seed reaches."

    def __init__(self):
        self.generator = np.random.default_rng()
        self.other = random.Random()
        self.old = np.random.RandomState()

    def noise(self):
        return self.generator.normal() + self.other.random() + self.old.normal()


class LateNoise(World):
    "Makes a new generator at each reset."

    def begin(self):
        self.generator = np.random.Generator(np.random.PCG64(self.np_random.integers(100)))

    def noise(self):
        return self.generator.normal()


class Walk(World):
    "Holds a Python generator, which goes on where it is."

    def begin(self):
        self.steps = (self.np_random.normal() + i for i in range(10**6))

    def noise(self):
        return next(self.steps)


class Thread(World):
    def __init__(self):
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=print)


class File(World):
    "Reads its noise from an open file, whose position is not data."

    def __init__(self):
        self.file = tempfile.TemporaryFile("w+")  # noqa: SIM115  it stays open
        self.file.write("".join(f"{i % 5 - 2}\n" for i in range(5_000)))
        self.file.seek(0)

    def noise(self):
        return float(self.file.readline()) + self.np_random.normal()

    def close(self):
        self.file.close()


class Entropy(World):
    def noise(self):
        return os.urandom(1)[0] / 255


class Level(World):
    "What differs shows itself only in later episodes: a closure counts them."

    def __init__(self):
        n = 0

        def count():
            nonlocal n
            n += 1
            return n

        self.count = count

    def begin(self):
        self.level = self.count()

    def noise(self):
        return self.np_random.normal() + self.level / 7


class Beings(World):
    "Its number of objects changes."

    def begin(self):
        self.beings = [
            Thing(x=self.np_random.normal()) for _ in range(self.np_random.integers(1, 50))
        ]

    def noise(self):
        for being in self.beings:
            being.x += self.np_random.normal()
        return self.beings[-1].x / 3


class Being:
    "One of many, which another one follows."

    def __init__(self, x):
        self.x, self.follows = x, None


class Straggler(Being):
    __slots__ = ("mark",)


class Box(Being):
    def __del__(self):
        pass


class Swarm(World):
    "Its number of objects changes, and of one kind there are none at first."

    def begin(self):
        self.beings = []
        self.t = 0
        self.newest = None

    def noise(self):
        self.t += 1
        if self.t % 3 == 1:
            self.beings.append((Straggler if self.t > 4 else Being)(self.np_random.normal()))
        if self.t % 5 == 0:
            del self.beings[0]
        self.newest = self.beings[-1]
        if isinstance(self.newest, Straggler):
            self.newest.mark = self.t
        self.newest.follows = self.beings[0]
        for being in self.beings:
            being.x += self.np_random.normal() / 4
        return sum(being.x for being in self.beings) + self.newest.follows.x / 2


class LateSwarm(Swarm):
    "Its objects come after the test of the ways to keep it is over."

    n_steps = 0

    def noise(self):
        self.n_steps += 1
        return super().noise() if self.n_steps > 380 else self.np_random.normal()


class History(World):
    "A list that each episode makes longer, which a new environment does not have."

    def __init__(self):
        self.log = []

    def begin(self):
        self.log.append(Thing(total=0.0))

    def noise(self):
        self.log[-1].total += (found := self.np_random.normal() * (1 if len(self.log) < 20 else 2))
        return found


@pytest.mark.parametrize("seconds", [0.0, 2.0])
def test_no_way_is_trusted_that_has_not_gone_over_an_end(seconds):
    "However slow the environment is."
    made = []

    class Tally(World):
        def __init__(self):
            self.number = len(made)
            made.append([])

        def begin(self):
            made[self.number].append("reset")

        def step(self, action):
            made[self.number].append("step")
            return super().step(action)

    assert keeper_for(Tally, seconds=seconds).name == "attributes"
    assert any("step reset step" in " ".join(done) for done in made), made


@pytest.mark.parametrize(
    "make, name",
    [
        (World, "attributes"),
        (GlobalNoise, "attributes"),
        (OwnNoise, "attributes"),
        (LateNoise, "attributes"),
        (Thread, "replay (all)"),
        (Walk, "replay (all)"),
        (File, "replay (all)"),
        (Level, "attributes"),
        (Beings, "replay (episode)"),
        (History, "replay (all)"),
        (Entropy, "none"),
    ],
)
def test_the_first_exact_way_is_taken(make, name):
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    keeper = keeper_for(make)
    assert keeper.name == name, keeper.failed
    assert (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    ) == states
    again = keeper_for(make)
    assert (again.name, list(again.failed)) == (keeper.name, list(keeper.failed))


@pytest.mark.parametrize("make", [Swarm, LateSwarm])
def test_objects_that_come_and_go_are_kept(make):
    assert check(make, "attributes").failed == {}


def test_no_object_is_made_whose_class_has_more_than_attributes():
    class Local(Being):
        pass

    for x, cls in [
        (Being(1), Being),
        (Straggler(1), Straggler),
        (Slim(), Slim),
        (World(), None),
        (Local(1), None),
        (Box(1), None),
        (Thing(), None),
        (threading.Thread(), None),
        (deque(), None),
        (Counter(), None),
    ]:
        assert plain_class(name_of(type(x))) is cls, x
    name = name_of(Being)
    assert (
        plain_class(name, {"json"}) is None
        and plain_class(name, {__name__}) is plain_class(name, {name.rpartition(".")[0]}) is Being
    )


def test_an_object_of_a_module_that_the_environment_does_not_use_is_refused():
    swarm = Swarm()
    swarm.reset(seed=1)
    for _ in range(9):
        swarm.noise()
    state = capture(swarm.beings)
    with pytest.raises(
        EnvError, match=r"beings\[0\].*Expected a .*Being, as when it was kept, got nothing"
    ):
        restore(state, [], "beings")
    assert [being.x for being in restore(state, [Being(0)], "beings")] == [
        being.x for being in swarm.beings
    ]


class Own(World):
    hidden: dict = {}  # a place that attributes do not show
    lost = 0  # what `get_state` forgets

    def __init__(self):
        self.key = id(self)

    def begin(self):
        self.hidden[self.key] = [0.0, self.np_random]

    def noise(self):
        self.hidden[self.key][0] += self.np_random.normal()
        return self.hidden[self.key][0] / 9

    def get_state(self):
        return {
            "x": self.x,
            "hidden": self.hidden[self.key][0],
            "noise": self.np_random.bit_generator.state,
        }

    def set_state(self, state):
        self.x = state["x"]
        self.hidden[self.key][0] = state["hidden"] + self.lost
        self.np_random.bit_generator.state = state["noise"]


class Lossy(Own):
    lost = 1e-12


class Draws(Own):
    "Keeping its state changes it."

    def get_state(self):
        self.np_random.normal()
        return super().get_state()


class OtherPair(Own):
    def set_state(self, x, hidden):
        raise AssertionError


def test_an_own_state_is_taken_if_it_is_exact():
    check(lambda: wrappers.TimeLimit(Own(), 20), "own")
    for make in (Lossy, Draws, OtherPair):
        keeper = keeper_for(make)
        assert keeper.name == "replay (episode)", keeper.failed
        assert ("differs" in keeper.failed.get("own", "")) == (make is not OtherPair)


class Bag(dict):
    drawn = 0


class Tagged(dict):
    "A dict that is its own attributes."

    def __init__(self, n):
        self.__dict__ = self
        self.n = n


def rule(n):
    return lambda: n


def bag(n):
    found = Bag()
    found.drawn = n
    return found


TABLE = np.arange(1.0, 7.0).reshape(3, 2)
SHARED = {  # kind -> constants, and what is read of one of them
    "array": ([np.full(2, n) for n in (1.0, 2.0, 3.0)], lambda x: x[1]),
    "row": (TABLE, lambda x: x[1]),
    "read by numpy": ([torch.full((2,), n).numpy() for n in (1.0, 2.0, 3.0)], lambda x: x[1]),
    "tensor": ([torch.full((2,), n) for n in (1.0, 2.0, 3.0)], lambda x: x[1].item()),
    "network": ([torch.nn.Linear(1, 1) for _ in range(3)], lambda x: x(torch.ones(1)).item()),
    "list": ([[1.0], [2.0], [3.0]], lambda x: x[0]),
    "set": ([{1.0}, {2.0}, {3.0}], lambda x: max(x)),
    "deque": ([deque([n], 2) for n in (1.0, 2.0, 3.0)], lambda x: x[0]),
    "dict": ([dict(n=n) for n in (1.0, 2.0, 3.0)], lambda x: x["n"]),
    "bag": ([bag(n) for n in (1.0, 2.0, 3.0)], lambda x: x.drawn),
    "its own attributes": ([Tagged(n) for n in (1.0, 2.0, 3.0)], lambda x: x.n),
    "object": ([Thing(n=n) for n in (1.0, 2.0, 3.0)], lambda x: x.n),
    "closure": ([rule(n) for n in (1.0, 2.0, 3.0)], lambda x: x()),
    "within": (
        [Thing(a=[dict(b=np.full(2, n))]) for n in (1.0, 2.0, 3.0)],
        lambda x: x.a[0]["b"][1],
    ),
}


class Shared(World):
    "Each episode has one of three constants, which no environment changes."

    def __init__(self, kind):
        self.kind = kind

    def begin(self):
        self.level = SHARED[self.kind][0][self.np_random.integers(3)]

    def noise(self):
        return self.np_random.normal() + float(SHARED[self.kind][1](self.level))


@pytest.mark.parametrize("name", ["attributes", "replay (episode)"])
@pytest.mark.parametrize("kind", SHARED)
def test_constants_of_a_class_or_module_stay_as_they_are(kind, name):
    "A new environment holds one constant, and the state another one."
    constants, read = SHARED[kind]
    before = [read(x) for x in constants]
    keeper = Keeper(name)
    draw = lambda: 1
    running = KeptEnv(Shared(kind), keeper)
    running.do("reset", dict(seed=1))
    for n in range(6):
        running.play(draw, 20, 3, np.inf)
        new = KeptEnv(Shared(kind), keeper)
        new.kept.restore(stored(running.kept.state()))
        assert [read(x) for x in constants] == before
        new.repeat(running.play(draw, 20, n, np.inf))
        running = new
    assert (
        keeper_for(lambda: Shared(kind)).name == "attributes"
        and [read(x) for x in constants] == before
    )


def anew(old, new):
    restore(stored(capture(old)), new, in_place=lambda x: x is new)
    return new


def test_what_an_environment_holds_twice_is_one_object_again():
    class Pair:
        def __init__(self, n):
            def put(x):
                nonlocal n
                n = x

            # two functions with one variable; and a name that hides a method
            self.get = lambda: n
            self.put = put
            self.tell = self.tell
            self.items = [n]
            self.also, self.append = self.items, self.items.append

        def tell(self):
            return self

    pair = Pair(3)
    constant = Pair(1)
    new = anew(Thing(pair=pair, again=pair), Thing(pair=constant, again=None))
    assert new.pair is new.again is new.pair.tell() and constant.tell() is constant
    assert (new.pair.get(), constant.get(), new.pair.items, constant.items) == (3, 1, [3], [1])
    new.pair.put(7)
    new.pair.append(8)
    assert (new.pair.get(), new.pair.also, constant.get(), constant.items) == (7, [3, 8], 1, [1])
    found = [
        anew(
            Thing(x=torch.nn.Parameter(torch.ones(2))), Thing(x=torch.nn.Parameter(torch.zeros(2)))
        ).x
    ]
    assert (
        isinstance(found[0], torch.nn.Parameter)
        and found[0].requires_grad
        and found[0].tolist() == [1, 1]
    )


def test_memory_of_a_simulator_and_what_it_ends_get_the_values_themselves():
    class Window:
        def __init__(self, n):
            self.n = n

        def __del__(self):
            ended.append(self.n)

    ended = []
    memory = (ctypes.c_double * 3)(1, 2, 3)
    old = Thing(at=np.arange(3.0), window=Window(1))
    new = Thing(at=np.frombuffer(memory), window=Window(2))
    window = new.window
    assert anew(old, new).window is window and list(memory) == [0, 1, 2] and ended == []


def test_an_environment_that_is_lent_is_left_alone():
    env = World()
    assert keeper_for(lambda: env).name == keeper_for(lambda: gym.Wrapper(env)).name == "none"
    assert not hasattr(env, "x")


# -- whole batches ----------------------------------------------------------------------------------------------------


def outcomes(batch, n, seed):
    "The bits of what a batch answers to random actions."
    space = batch.action_space
    found = []
    space.seed(seed)
    for _ in range(n):
        act = nested.map(
            lambda x: torch.as_tensor(x)[None],
            nested.stack([space.sample() for _ in range(len(batch))]),
        )
        out = batch.step(act)
        if "episode" in out.info:
            del out.info["episode"]["t"]  # a duration on the clock
        found.append(
            dict(bits_of([*out.state, out.term, out.final, out.ended, out.info, out.valid], "out"))
        )
    return found


def begun(make, seed=3):
    keeper = keeper_for(lambda: make[0](0))
    return env_batch(make, np.random.SeedSequence(seed), sticky=None, keeper=keeper), keeper


def state_of(batch):
    rows, t = batch._at
    row = rows.rows[t]
    return stored(capture([batch.get_state(), row.state(()), row.term]))


def go_on(batch, state):
    own, row, term = restore(state)
    batch.set_state(own)
    batch._at = rows, _ = batch.rows(), 0
    rows.put(0, row, term)


BATCHES = {
    "attributes": lambda: env_factories(
        lambda: wrappers.NormalizeObservation(wrappers.RecordEpisodeStatistics(World())), 3
    ),
    "replay (episode)": lambda: env_factories(Beings, 2),
    "replay (all)": lambda: env_factories(Walk, 2),
    **{
        mode: lambda mode=mode: [
            EnvFactory(lambda: gym.vector.SyncVectorEnv([World] * 3, autoreset_mode=mode))
        ]
        for mode in ("SameStep", "NextStep", "Disabled")
    },
    **{
        f"Walk {mode}": lambda mode=mode: [
            EnvFactory(lambda: gym.vector.SyncVectorEnv([Walk] * 3, autoreset_mode=mode))
        ]
        for mode in ("SameStep", "NextStep", "Disabled")
    },
}


@pytest.mark.slow_but_one
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_goes_on_where_it_was(name):
    factories = BATCHES[name]()
    batch, keeper = begun(factories)
    batch.reset()
    assert keeper.logs == ("replay" in name or "Walk" in name)
    for n in (1, 40, 7):
        outcomes(batch, n, 1)
        new, _ = begun(factories)
        go_on(new, state_of(batch))
        expected = outcomes(batch, 60, 2)
        found = outcomes(new, 60, 2)
        assert [set(x.items()) ^ set(y.items()) for x, y in zip(expected, found)] == [set()] * 60
        batch.close()
        batch = new
    batch.close()


# -- what does not fit ------------------------------------------------------------------------------------------------


def refused(text, make, state, name="attributes"):
    with pytest.raises(EnvError, match=text):
        Keeper(name).begin(make()).restore(state)


def test_states_that_do_not_fit_are_refused_by_name():
    env = gym.make("CartPole-v1")
    env.reset(seed=0)
    state = Keeper("attributes").begin(env).state()
    refused(
        "leaf env.env.env.env: .*Expected a gymnasium.envs.classic_control.cartpole.CartPoleEnv, .*got a .*PendulumEnv",
        lambda: gym.make("Pendulum-v1"),
        state,
    )
    refused(
        "leaf env: .*TimeLimit, .* got a .*CartPoleEnv",
        lambda: gym.make("CartPole-v1").unwrapped,
        state,
    )
    refused("Expected the keeper 'own', got 'attributes'", World, state, "own")
    refused("another way.*got 'int'", World, 3)
    env.unwrapped.more = 1
    lacking = {**state, "graph": state["graph"].replace('"gravity"', '"gravitas"')}
    refused(
        "leaf env.env.env.env.gravity: the state lacks an attribute",
        lambda: gym.make("CartPole-v1"),
        lacking,
    )
    three, two = (gym.make_vec("CartPole-v1", n, "sync") for n in (3, 2))
    three.reset(seed=0)
    with pytest.raises(EnvError, match=r"leaf env.envs\[2\]: .*got nothing"):
        Keeper("attributes").begin(two).restore(Keeper("attributes").begin(three).state())
    other = Keeper("replay (all)").begin(World())
    other.reset(0)
    refused(
        "Expected test_keeping.World, got test_keeping.Level", Level, other.state(), "replay (all)"
    )
    with pytest.raises(EnvError, match="only in a new environment"):
        other.restore(other.state())


class Metres(float):
    "A number of a class of its own, which cannot be made without calling the class."


@pytest.mark.parametrize(
    "old, new",
    [
        (len, print),
        (Metres(1), Metres(2)),
        (dict, list),
        (json, pickle),
        (lambda x: x, lambda x: 2 * x),
        (os.path.join, os.path.split),
    ],
)
def test_what_stays_has_to_be_the_same(old, new):
    assert restore(capture(Thing(x=old)), Thing(x=old)).x is old
    with pytest.raises(EnvError, match="leaf env.x: the state does not fit"):
        restore(capture(Thing(x=old)), Thing(x=new))


class Hand(list):
    "A container of a class of its own."


@pytest.mark.parametrize("fresh", [None, [1], deque([1])])
def test_a_container_of_a_class_of_its_own_has_to_be_there(fresh):
    kept = capture(Thing(x=Hand([1, 2])))
    found = restore(kept, Thing(x=Hand())).x
    assert (type(found), found) == (Hand, [1, 2])
    with pytest.raises(
        EnvError,
        match=r"leaf env.x: .*Expected a test_keeping.Hand, .*got a \w+\.(NoneType|list|deque)",
    ):
        restore(kept, Thing(x=fresh))


ZONE = datetime.timezone(datetime.timedelta(hours=2), "here")
VALUES = [
    range(2, 9, 3),
    slice(1, None),
    Path("a/b"),
    PureWindowsPath("c:/x"),
    datetime.date(2024, 2, 3),
    datetime.time(3, fold=1),
    datetime.datetime(2024, 2, 3, fold=1, tzinfo=ZONE),
    datetime.timedelta(3, 4),
    ZONE,
    Decimal("1.50"),
    Fraction(1, 3),
]


@pytest.mark.parametrize("x", VALUES, ids=repr)
def test_values_come_back_whatever_a_new_environment_has(x):
    for fresh in (x, None, VALUES[0], VALUES[2]):
        found = restore(stored(capture(Thing(x=x))), Thing(x=fresh)).x
        assert (type(found), found, repr(found)) == (type(x), x, repr(x))


def easy(x):
    return 0.0


def hard(x):
    return x


class Curriculum(World):
    "From the 30th episode on something is different, which a test at the start does not see."

    def __init__(self, kind):
        self.kind = kind
        self.n = 0
        self.rule = easy
        self.track = Path("a")
        self.span = range(3)
        self.limits, self.image = (gym.spaces.Box(-1, 1, shape) for shape in ((1,), (40, 40)))

    def begin(self):
        self.n += 1
        if self.n != 30:
            return
        if self.kind == "function":
            self.rule = hard
        if self.kind == "path":
            self.track = Path("b")
        if self.kind == "range":
            self.span = range(7)
        if self.kind == "space":
            self.limits = gym.spaces.Box(-3, 3, (1,))
        if self.kind == "bounds":
            self.limits.high[:] = 3
        if self.kind == "image":
            self.image.low[3, 3] = 0
        if self.kind == "spec":
            self.spec.kwargs["bonus"] = 5.0

    def noise(self):
        found = (
            np.clip(3 * self.np_random.normal(), self.limits.low, self.limits.high)[0]
            + self.rule(self.x) / 9
        )
        return (
            found
            + len(self.span)
            + self.image.low[3, 3]
            + (self.track.name == "b")
            + self.spec.kwargs.get("bonus", 0.0)
        )


@pytest.mark.parametrize("kind", ["function", "path", "range", "space", "bounds", "image", "spec"])
def test_what_changes_late_comes_back_or_is_refused(kind):
    def make():
        env = Curriculum(kind)
        env.spec = gym.envs.registration.EnvSpec(
            "Curriculum-v0", Curriculum, kwargs=dict(kind=kind)
        )
        return env

    keeper = keeper_for(make, seconds=0.1)
    assert keeper.name == "attributes", keeper.failed
    running = KeptEnv(make(), keeper)
    new = KeptEnv(make(), keeper)
    for i in range(31):
        running.do("reset", dict(seed=i))
    state = stored(running.kept.state())
    if kind == "image":
        told = r"leaf env.image.low: .*Expected numpy.ndarray float32 \(40, 40\) \d+, as when"
        with pytest.raises(EnvError, match=told):
            new.kept.restore(state)
    else:
        new.kept.restore(state)
        new.repeat(running.play(lambda: 1, 20, 30, np.inf))


def test_functions_of_modules_that_an_environment_does_not_use_are_refused():
    "A state that somebody has made could name any function for the environment to call."
    state = capture(Thing(f=shutil.rmtree))
    for f in (easy, shutil.copy, None):
        with pytest.raises(
            EnvError, match="leaf env.f: .*Expected builtins.function shutil.rmtree"
        ):
            restore(state, Thing(f=f))
    assert (
        restore(capture(Thing(f=hard)), Thing(f=easy)).f is hard
        and restore(capture(Thing(f=World)), Thing(f=easy)).f is World
    )


def test_methods_are_those_of_the_objects_that_had_them():
    "Also of an object that the state names later."
    first = ([1], [2], [3], [4])
    second = Thing()
    new = Thing()
    second.call = first[1].append
    second.all = first
    second.later = first[3].pop
    new.call = first[0].append
    new.all = ([], [], [], [])
    new.later = [].pop
    assert restore(capture(second), new) is new and new.all == ([1], [2], [3], [4])
    assert (
        new.call.__self__ is new.all[1]
        and new.call.__name__ == "append"
        and new.later.__self__ is new.all[3]
    )


def test_functions_are_found_though_another_one_was_in_their_place():
    def rules():
        return [lambda x: x, lambda x: -x, lambda x: 2 * x]

    old = Thing()
    new = Thing()
    old.all = rules()
    new.all = rules()
    old.rule = old.all[2]
    new.rule = new.all[0]
    assert (
        restore(capture(Thing(rule=old.rule, all=old.all)), Thing(rule=new.rule, all=new.all)).rule
        is new.all[2]
    )


def hidden(f):
    def wrapper(self):
        return f(self)

    return wrapper


class Hidden:
    @hidden
    def one(self):
        return 1

    @hidden
    def two(self):
        return 2


def test_a_method_that_hides_its_name_is_refused():
    "Two of them look alike."
    with pytest.raises(
        EnvError, match="does not have it under its name. Got .*hidden.<locals>.wrapper"
    ):
        capture(Thing(f=Hidden().one))


@pytest.mark.parametrize("code", ["def rule(): return 1", "class rule: pass"])
def test_functions_and_classes_of_two_modules_differ_though_their_names_do_not(code):
    modules = [ModuleType(name) for name in ("easy", "hard")]
    for module in modules:
        exec(code, vars(module))
    old, new = (module.rule for module in modules)
    told = "Expected builtins.* easy.rule.* got builtins.* hard.rule"
    with pytest.raises(EnvError, match=told):
        restore(capture(Thing(f=old)), Thing(f=new))


def test_a_partial_function_has_the_arguments_that_it_had():
    old = Thing(all=[[1]])
    new = Thing(all=[[0]])
    old.f = functools.partial(max, old.all[0], key=old.all)
    new.f = functools.partial(max, new.all[0], key=None)
    found = restore(capture(old), new)
    assert found is new and (new.f.func, new.f.args, new.f.keywords) == (
        max,
        ([1],),
        dict(key=[[1]]),
    )
    assert new.f.args[0] is new.all[0] and new.f.keywords["key"] is new.all


class Sub(np.ndarray):
    pass


@pytest.mark.parametrize(
    "x",
    [
        (i for i in range(3)),
        itertools.count(),
        array.array("l", [0]),
        queue.Queue(),
        np.zeros(1).view(Sub),
        np.ma.masked_array([0.0]),
        weakref.ref(World),
        threading.Thread(target=print),
    ],
)
def test_what_may_change_and_cannot_be_written_down_is_refused(x):
    with pytest.raises(EnvError, match="cannot be written down. Got .*" + type(x).__name__):
        capture(Thing(x=x))


class Late(World):
    "Differs from a new one only after many steps, where a test at the start does not see it."

    def __init__(self):
        self.total = itertools.count()

    def noise(self):
        return self.np_random.normal() * (1 if (n := next(self.total)) < 1000 else 2 + n % 7)


def test_an_environment_that_differs_late_is_not_kept_by_its_attributes():
    assert begun(env_factories(Late, 2))[1].name == "replay (all)"


class OwnRandom(random.Random):
    pass


class Draws50(World):
    "Draws a new level in each 50th episode from the state that `make` returns."

    n, level = 0, 0.0

    def __init__(self, make, draw):
        self.held = make()
        self.draw = draw

    def begin(self):
        self.n += 1
        if self.n % 50 == 2:
            self.level = self.draw(self, self.held)
        self.x = self.level


def from_bag(env, bag):
    bag.drawn += 1
    return bag.drawn


def from_spawn(env, _):
    return env.np_random.spawn(1)[0].normal()


def from_seeds(env, seeds):
    return np.random.default_rng(seeds.spawn(1)[0]).normal()


def from_bits(env, bits):
    return bits.random_raw() % 1000


def from_random(env, rng):
    return rng.random()


def from_default(env, numbers):
    return numbers[len(numbers)]


@pytest.mark.parametrize(
    "name, make, draw",
    [
        ("attributes", lambda: None, from_spawn),
        ("attributes", lambda: np.random.SeedSequence([1, 2]), from_seeds),
        *(
            ("attributes", functools.partial(kind, 1), from_bits)
            for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox)
        ),
        ("attributes", Bag, from_bag),
        ("replay (all)", lambda: OwnRandom(1), from_random),
        ("replay (all)", lambda: defaultdict(itertools.count().__next__), from_default),
    ],
)
def test_a_state_that_matters_late_is_kept_or_refused(name, make, draw):
    old = Draws50(make, draw)
    new = Draws50(make, draw)
    keeper = keeper_for(lambda: Draws50(make, draw), seconds=0.1)
    assert keeper.name == name, keeper.failed
    if keeper.logs:
        return
    kept = keeper.begin(old)
    told = []
    old.reset(seed=5)
    for _ in range(160):
        old.reset()
    keeper.begin(new).restore(stored(kept.state()))
    for env in (old, new):
        told.append([float(env.reset()[0][0]) for _ in range(120)])
    assert told[0] == told[1] and len(set(told[0])) == 3


def test_generators_share_what_they_shared():
    "Those that spawn from one sequence of seeds draw different children."

    def world(seed):
        seeds = np.random.SeedSequence(seed)
        bits = np.random.Philox(seeds)
        return Thing(
            seeds=seeds, bits=bits, one=np.random.Generator(bits), two=np.random.Generator(bits)
        )

    old = world(3)
    new = world(4)
    old.one.spawn(2)
    assert restore(stored(capture(old)), new) is new
    for x in (old, new):
        drawn = [
            x.one.random(),
            x.two.random(),
            x.bits.random_raw(),
            *(g.random() for g in x.two.spawn(2)),
            x.seeds.n_children_spawned,
        ]
        if x is old:
            expected = drawn
    assert drawn == expected and new.one.bit_generator is new.two.bit_generator is new.bits


def test_a_model_that_was_changed_is_refused():
    "Its numbers are no part of the state."
    pytest.importorskip("mujoco")

    class Heavier(gym.Wrapper):
        n = 0

        def reset(self, **kwargs):
            self.n += 1
            if self.n == 12:
                self.unwrapped.model.body_mass[1] *= 1.5
            return self.env.reset(**kwargs)

    def make():
        return Heavier(gym.make("InvertedPendulum-v5", disable_env_checker=True))

    env = make()
    keeper = keeper_for(make, seconds=0.1)
    assert keeper.name == "MuJoCo"
    kept = keeper.begin(env)
    for _ in range(11):
        env.reset(seed=3)
    state = stored(kept.state())
    keeper.begin(make()).restore(state)
    env.reset()
    with pytest.raises(
        EnvError, match=r"leaf .*model: .*Expected mujoco._structs.MjModel \d+, as when"
    ):
        keeper.begin(make()).restore(kept.state())


def test_a_model_of_other_size_is_refused():
    pytest.importorskip("mujoco")
    env, other = (
        gym.make(name, disable_env_checker=True).unwrapped for name in ("Hopper-v5", "Ant-v5")
    )
    env.reset(seed=0)
    with pytest.raises(EnvError, match="leaf env: .*another model"):
        restore(capture(env.data), other.data)


DAMAGED = [
    "",
    "{}",
    "[[0],[]]",
    "[[1],[]]",
    '[[0],[["object"]]]',
    '[[0],[["enum","os.system","RED"]]]',
    '[[0],[["system","ls"]]]',
    '[[0],[["items","subprocess.Popen",["ls"],null]]]',
    '[[0],[["through","os.system",1]]]',
    '[[0],[["own","os.system",1]]]',
    '[[0],[["items","builtins.tuple",[[0]],null]]]',
    '[[0],[["number","|O","00"]]]',
    '[[0],[["bytes","builtins.bytes",5,9]]]',
    '[[0],[["array",[1],["|O"],[1],[8],0],["memory",0,8]]]',
    '[[0],[["array",[1],["<f8"],[9],[8],0],["memory",0,8]]]',
    '[[0],[["array",[1],["<f8"],[1],[8],0],["memory",4,8]]]',
    '[[0],[["array",[1],["<f8"],[1],[8],-8],["memory",0,8]]]',
    '[[0],[["array",[1],["float64","cpu"],[3],[1],0],["memory",0,8]]]',
    '[[0],[["array",[1],["load","cpu"],[1],[1],0],["memory",0,8]]]',
]


@pytest.mark.parametrize("graph", DAMAGED)
def test_a_damaged_state_is_an_error_and_executes_nothing(graph):
    with pytest.raises(EnvError):
        restore(dict(graph=graph, memory=torch.zeros(8, dtype=torch.uint8)))


# -- all kinds of data ------------------------------------------------------------------------------------------------

numbers = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | st.sampled_from(Colour)
)
some_arrays = arrays.arrays(
    arrays.scalar_dtypes() | arrays.array_dtypes(),
    arrays.array_shapes(min_dims=0, min_side=0, max_side=3),
)
hashable = st.recursive(
    numbers,
    lambda x: st.tuples(x, x) | st.frozensets(x, max_size=3) | st.builds(Point, x, x),
    max_leaves=4,
)
trees = st.recursive(
    numbers | some_arrays | some_arrays.map(lambda x: x.T) | hashable,
    lambda x: (
        st.lists(x, max_size=3)
        | st.tuples(x, x)
        | st.dictionaries(hashable, x, max_size=3)
        | st.builds(Point, x, x)
        | st.lists(x, max_size=3).map(lambda y: deque(y, 5))
        | st.sets(hashable, max_size=3)
        | st.dictionaries(st.text(), x, max_size=3).map(OrderedDict)
    ),
    max_leaves=8,
)


def text(x):
    "Kinds, values and order, apart from the order of a set."
    if isinstance(x, np.ndarray):
        return f"{x.dtype!r} {x.shape} {x.tobytes()!r}"
    if isinstance(x, dict):
        return f"{type(x)} {[(text(k), text(y)) for k, y in x.items()]}"
    if isinstance(x, (set, frozenset)):
        return f"{type(x)} {sorted(map(text, x))}"
    if isinstance(x, (list, tuple, deque)):
        return f"{type(x)} {list(map(text, x))} {getattr(x, 'maxlen', 0)}"
    return f"{type(x)} {x!r}"


@settings(deadline=None, max_examples=150)
@given(trees, trees, st.booleans())
def test_plain_data_come_back(tree, other, in_place):
    assert text(restore(stored(capture(tree)))) == text(tree)
    a = Thing(tree=tree, both=[tree])
    b = Thing(tree=other, both=[other])
    before = text(other)
    restore(stored(capture(a)), b, in_place=lambda x: in_place or x is b)
    assert text(b.tree) == text(a.tree) and text(b.both) == text(a.both)
    assert in_place or text(other) == before
    if isinstance(a.tree, (list, dict, np.ndarray)):
        assert b.tree is b.both[0]


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 6), st.sampled_from([1, 2, -1])),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_views_of_one_memory_stay_views_of_one_memory(cuts, torchy, in_place, data):
    def world(seed, cuts):
        base = np.random.default_rng(seed).normal(size=(6, 2))
        base = torch.from_numpy(base) if torchy else base
        return Thing(
            views=[base[i : j : abs(k)] if torchy else base[i:j:k].T for i, j, k in cuts], base=base
        )

    a = world(0, cuts)
    b = world(1, data.draw(st.permutations(cuts)))
    restore(stored(capture(a)), b, in_place=lambda x: in_place or x is b)
    for x in (a, b):
        x.base[data.draw(st.integers(0, 5)) if x is a else slice(None)] = a.base if x is b else 7.0
    assert all(np.array_equal(x, y) for x, y in zip([a.base, *a.views], [b.base, *b.views]))


def test_names_of_one_object_stay_names_of_one_object():
    def world(n):
        x = [n]
        slim = Slim()
        slim.a = x
        slim.b = np.full(2, n)
        w = Thing(
            x=x,
            y=x,
            slim=slim,
            array=slim.b,
            colour=Colour(n),
            count=Counter("ab" * n),
            more=defaultdict(list, {n: [n]}),
            tensor=torch.full((2,), n),
        )
        w.me, w.flat = w, w.tensor.view(2, 1)
        w.apart = (
            np.full(2, n) if n == 2 else slim.b
        )  # one array in the new environment, and two in the old one
        w.objects = np.array([x, w, None], object)
        return w

    old = world(2)
    new = world(1)
    array, more = new.array, new.more
    restore(stored(capture(old)), new)
    assert (
        new.x is new.y is new.slim.a is new.objects[0]
        and new.x == [2]
        and new.me is new.objects[1] is new
    )
    assert (
        new.array is array is new.slim.b and new.more is more and more == {2: [2]} and more[5] == []
    )
    assert (new.colour, new.count) == (Colour.BLUE, Counter("abab"))
    new.array[:] = 9
    new.tensor[:] = 9
    assert new.apart.tolist() == [2, 2] and new.flat.tolist() == [[9], [9]]


def test_nothing_is_written_that_a_pickle_would_need():
    env = gym.make("CartPole-v1")
    env.reset(seed=0)
    state = Keeper("attributes").begin(env).state()
    assert set(state) == {"keeper", "graph", "memory"} and isinstance(
        json.loads(state["graph"]), list
    )
    assert pickle.dumps(env) not in bytes(state["memory"].numpy())
