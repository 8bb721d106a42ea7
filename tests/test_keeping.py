"""The ways to keep a running environment: each is exact or refused.

What a state says is never executed.
"""

import array
import datetime
import enum
import itertools
import os
import queue
import random
import tempfile
import threading
import time
import weakref
import zlib
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from contextlib import nullcontext
from decimal import Decimal
from fractions import Fraction
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path, PureWindowsPath
from types import FunctionType
from types import SimpleNamespace as Thing

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import wrappers
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from reference import assert_same
from resuming import encoded

from rollpipe.pipes import nested
from rollpipe.pipes.data.errors import EnvError
from rollpipe.pipes.envs.factories import env_factories
from rollpipe.pipes.envs.keeping import Keeper, KeptEnv, bits_of, keeper_for, sampler
from rollpipe.pipes.envs.kept import ActionLog, KeptActions, answer_checksum, restore_batch
from rollpipe.pipes.envs.vector import env_batch
from rollpipe.pipes.keeping.copies import copies_of, env_parts, put_copies
from rollpipe.pipes.keeping.plain import capture, may_be_new, restore_object
from rollpipe.pipes.keeping.random_states import GlobalRandomStates
from rollpipe.pipes.tensors.tensor_env import TensorEnv

Point = namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED, BLUE = 1, 2


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
        info = {"noise": self.x**2, "name": "x"}
        return np.float32([self.x]), float(self.x), bool(abs(self.x) > 6), False, info


def right():
    "An action of a `World`."
    return 1


def begun(make, keeper, seed=3, draw=right, n=0, more=0):
    "A `KeptEnv` after a reset, up to `n` steps to the end of an episode, and `more` steps."
    running = KeptEnv(make(), keeper)
    running.do("reset", dict(seed=seed))
    running.play(draw, n, more, np.inf)
    return running


def restored(make, keeper, running):
    "A new environment that goes on from the state of another one, as a batch makes it."
    new = KeptEnv(make(), keeper)

    def anew(b):
        new.__init__(make(), keeper)
        return new.kept

    state = encoded(running.kept.state())
    restore_batch([new.kept], [state], anew, lambda b: nullcontext())
    return new


def successor(make, keeper, running, draw=right, n=50, more=50):
    "A new environment that goes on from the state of another one, and repeats its next steps."
    new = restored(make, keeper, running)
    new.repeat(running.play(draw, n, more, np.inf))
    return new


def goes_on(make, keeper, seed=0, n=300):
    "Keep an environment after `n` steps and an episode, and go on in a new one, twice."
    running = begun(make, keeper, seed + 5)
    running.env.action_space.seed(7)
    running.play(running.env.action_space.sample, n, 111, np.inf)
    for _ in range(2):
        new = successor(make, keeper, running, running.env.action_space.sample, 100)
        running.env.close()
        running = new
    running.env.close()


def check(make, *names, seed=0):
    "Keep an environment, after more steps than the test of `keeper_for` takes."
    keeper = keeper_for(make, seed)
    assert keeper.name in names, (keeper, keeper.failed)
    goes_on(make, keeper, seed)
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
def test_classic_environments_are_copied(name):
    assert check(lambda: gym.make(name), "copy").failed == {}


@pytest.mark.parametrize("name", MUJOCO)
def test_mujoco_is_kept_by_its_arrays(name):
    pytest.importorskip("mujoco")
    assert check(lambda: gym.make(name), "MuJoCo").failed == {}


def test_box2d_is_kept_by_what_was_done():
    pytest.importorskip("Box2D")
    assert "copy" in check(lambda: gym.make("LunarLander-v3"), "replay (episode)").failed
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
    lambda env: wrappers.TransformReward(env, lambda reward: 2 * reward),
]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("name", ["CartPole-v1", "Hopper-v5"])
def test_wrappers_are_kept_too(wrap, name):
    if name == "Hopper-v5":
        pytest.importorskip("mujoco")
    check(lambda: wrap(gym.make(name)), "copy", "MuJoCo")


@pytest.mark.parametrize("mode", ["SameStep", "NextStep", "Disabled"])
def test_a_vector_is_kept_as_one(mode):
    check(
        lambda: gym.make_vec("CartPole-v1", 3, "sync", vector_kwargs=dict(autoreset_mode=mode)),
        "copy",
    )


def test_ends_that_are_numbers():
    class Numbers(gym.Wrapper):
        def step(self, action):
            obs, rew, *ends, info = self.env.step(action)
            return obs, rew, *map(float, ends), info

    check(lambda: Numbers(gym.make("CartPole-v1")), "replay (episode)")


def test_vectors_of_their_own_class_are_kept_and_processes_are_not():
    check(lambda: gym.make_vec("CartPole-v1", 3, "vector_entry_point"), "copy")
    keeper = keeper_for(
        lambda: wrappers.vector.RecordEpisodeStatistics(gym.make_vec("CartPole-v1", 2, "async"))
    )
    assert keeper.name == "none"
    assert keeper.failed == {"processes": "AsyncVectorEnv keeps its environments out of reach"}


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
        return self.obs, act.float(), torch.zeros_like(trunc), trunc, final, {"age": self.age}


def test_tensors_are_kept_as_they_share_memory():
    assert keeper_for(Tensors).name == "copy"
    env = Tensors()
    new = Tensors()
    env.reset(3)
    env.step(torch.ones(3, dtype=torch.int64))
    Keeper("copy").begin(new).restore(encoded(Keeper("copy").begin(env).state()))
    assert len({x.untyped_storage().data_ptr() for x in (new.memory, new.obs, new.age)}) == 1
    left = torch.zeros(3, dtype=torch.int64)
    assert_same(env.step(left)[:2], new.step(left)[:2])


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


class Iterating(World):
    "Takes its noise from an iterator that goes on over its episodes."

    def __init__(self):
        self.numbers = iter(np.random.default_rng(3).normal(size=100_000))

    def noise(self):
        return next(self.numbers)


class Late(World):
    "Holds an iterator, by which it differs only after many steps: the test at the start does not see it."

    def __init__(self):
        self.total = itertools.count()

    def noise(self):
        n = next(self.total)
        return self.np_random.normal() * (1 if n < 1000 else 2 + n % 7)


class Thread(World):
    def __init__(self):
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=print)


class File(World):
    "Reads its noise from an open file, whose position is not data."

    def __init__(self):
        self.file = numbers_in_a_file()

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
        x = self.np_random.normal() * (1 if len(self.log) < 20 else 2)
        self.log[-1].total += x
        return x


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

    assert keeper_for(Tally, seconds=seconds).name == "replay (episode)"
    assert any("step reset step" in " ".join(done) for done in made), made


@pytest.mark.parametrize(
    "make, name",
    [
        (World, "replay (episode)"),
        (GlobalNoise, "replay (all)"),
        (OwnNoise, "replay (episode)"),
        (LateNoise, "replay (episode)"),
        (Thread, "replay (all)"),
        (Walk, "replay (all)"),
        (File, "replay (all)"),
        (Level, "replay (all)"),
        (Iterating, "replay (all)"),
        (Beings, "replay (episode)"),
        (History, "replay (all)"),
        (Entropy, "none"),
        (Late, "replay (all)"),
    ],
)
def test_the_first_exact_way_is_taken(make, name):
    "Global generators stay as they are, and another test finds the same."
    states = global_states()
    keeper = keeper_for(make)
    assert keeper.name == name, keeper.failed
    assert global_states() == states
    again = keeper_for(make)
    assert (again.name, list(again.failed)) == (keeper.name, list(keeper.failed))


def global_states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


class Halving(World):
    "Changes its action in place."

    action_space = gym.spaces.Box(-1, 1, (1,))

    def step(self, action):
        action *= 0.5
        return super().step(action.item())


class HalvingTensors(Tensors):
    "Changes its actions in place, and holds an iterator, which cannot be copied."

    action_space = gym.spaces.Box(-1, 1, ())

    def __init__(self):
        self.numbers = iter(range(100_000))

    def step(self, act):
        act *= 0.5
        return super().step(act + next(self.numbers))


def test_an_environment_that_changes_its_action_in_place_is_replayed():
    check(Halving, "replay (episode)")
    keeper = keeper_for(HalvingTensors)
    assert keeper.name == "replay (all)", keeper.failed

    # A replay leaves the log as it was, so one may follow another.
    running = begun(HalvingTensors, keeper, 1, sampler(HalvingTensors(), 0), more=5)
    actions = running.kept.log.pack().clone()
    for _ in range(2):
        running = restored(HalvingTensors, keeper, running)
        assert torch.equal(running.kept.log.pack(), actions)


@pytest.mark.parametrize("make", [Swarm, LateSwarm])
def test_objects_that_come_and_go_are_kept(make):
    assert check(make, "replay (episode)").failed == {}


class Comes(World):
    """After 400 steps, long after the test at the start, it holds something new.

    This goes on over its episodes.
    """

    n_steps = 0
    more = None

    def noise(self):
        self.n_steps += 1
        if self.n_steps == 400:
            self.more = self.comes()
        return self.np_random.normal() + (0.0 if self.more is None else type(self).read(self.more))

    def close(self):
        if hasattr(self.more, "close"):
            self.more.close()


def comes(new, read=next):
    "A class of environments to which `new(env)` comes; `read` takes its next number."
    return type("Comes", (Comes,), dict(comes=new, read=staticmethod(read)))


def shift(env):
    by = env.np_random.normal()

    def shifted():
        nonlocal by
        by += 0.01
        return by

    return shifted


def mirrored(thing):
    thing.being.x *= -1.01
    return thing.being.x


class Ends:
    "An object that does something when it is gone."

    def __del__(self):
        pass


def numbers_in_a_file(_=None):
    file = tempfile.TemporaryFile("w+")
    file.write("".join(f"{i % 5 - 2}\n" for i in range(5_000)))
    file.seek(0)
    return file


ITERATOR = comes(lambda env: iter(env.np_random.normal(size=10_000)))
CLOSURE = comes(shift, lambda shifted: shifted())
LATE = {
    "iterator": ITERATOR,
    "generator": comes(lambda env: (i % 3 - 1.0 for i in range(10_000))),
    "closure": CLOSURE,
    "function": comes(lambda env: lambda: 1.0, lambda one: one()),
    "object": comes(lambda env: Thing(being=Being(env.np_random.normal())), mirrored),
    "object that is missed": comes(lambda env: Ends(), lambda _: 1.0),
    "in a dict": comes(
        lambda env: dict(tasks=[3, iter(range(9999))]), lambda x: next(x["tasks"][1]) % 3
    ),
    "file": comes(numbers_in_a_file, lambda file: float(file.readline())),
}


@pytest.mark.parametrize("name", LATE)
def test_what_comes_late_is_exact(name):
    "The episode is enough in the test at the start, and not later: then all actions are repeated."
    made = []

    def counted():
        made.append(LATE[name]())
        return made[-1]

    keeper = keeper_for(counted)
    assert keeper.name == "replay (episode)", keeper.failed
    for env in made:
        env.close()
    goes_on(LATE[name], keeper, n=600)


def test_a_batch_repeats_all_where_the_episode_is_not_enough():
    "A new environment takes the place of the one that was played already."
    batch, new = batches_of(CLOSURE, 2, "replay (episode)")
    outcomes(batch, 500, 1)
    first = list(new.envs)
    go_on(new, state_of(batch))
    assert all(x is not y for x, y in zip(first, new.envs))
    assert outcomes(new, 60, 2) == outcomes(batch, 60, 2)
    batch.close()
    new.close()


class Slow(World):
    "A step takes so long that the test at the start is cut short."

    def noise(self):
        time.sleep(0.01)
        return super().noise()


def test_slow_steps_are_kept_too():
    keeper = keeper_for(Slow, seconds=0.05)
    assert keeper.name == "replay (episode)" and keeper.step_seconds >= 0.01


def test_global_generators_are_replayed_for_a_whole_batch():
    "Its environments draw from them in turn."
    batch, new = batches_of(GlobalNoise, 3, "replay (all)")
    outcomes(batch, 200, 1)
    state = state_of(batch)
    with GlobalRandomStates():
        expected = outcomes(batch, 60, 2)
        go_on(new, state)
    assert outcomes(new, 60, 2) == expected


def played(make, keeper):
    "A `KeptEnv` that has played three episodes of five steps."
    one = KeptEnv(make(), keeper)
    for arguments in (dict(seed=3), {}, {}):
        one.do("reset", arguments)
        for action in (0, 1, 1, 0, 1):
            one.do("step", action)
    return one


@pytest.mark.parametrize("name", ["replay (episode)", "replay (all)"])
def test_a_replay_that_differs_is_refused_with_the_way_out(name):
    "An environment that was repaired, say, since the state was saved."

    class Repaired(World):
        def noise(self):
            return super().noise() + 1e-6

    Repaired.__qualname__ = "World"
    Repaired.__module__ = World.__module__
    keeper = Keeper(name)
    one = played(World, keeper)
    assert restored(World, keeper, one).env.x == one.env.x
    told = (
        "gives other observations or rewards.*Expected the checksum .*`get_state` and `set_state`"
    )
    with pytest.raises(EnvError, match=told):
        restored(Repaired, keeper, one)


@pytest.mark.slow
def test_a_log_that_grows_too_long_keeps_the_episode_alone(monkeypatch):
    monkeypatch.setattr(KeptActions, "MOST", 1000)
    keeper = Keeper("replay (episode)")
    running, closure, iterator = (
        begun(make, keeper, n=100, more=5000) for make in (World, CLOSURE, ITERATOR)
    )
    assert len(running.kept.log) < 1100
    successor(World, keeper, running)
    with pytest.raises(EnvError, match="were too many to be kept"):
        restored(CLOSURE, keeper, closure)
    with pytest.raises(EnvError, match="too many actions, .* Got builtins.iterator"):
        iterator.kept.state()


def test_a_log_that_is_too_long_is_dropped(monkeypatch):
    "It is lost for good if all actions have to be repeated, or else up to the next reset."
    monkeypatch.setattr(KeptActions, "MOST", 1050)
    monkeypatch.setattr(ActionLog, "CHUNK", 50)
    for name in ("replay (all)", "replay (episode)"):
        keeper = Keeper(name)
        running = begun(World, keeper)
        running.do("reset", {})
        for _ in range(1000):
            running.do("step", 1)
        assert restored(World, keeper, running).env.x == running.env.x
        for _ in range(200):
            running.do("step", 1)
        with pytest.raises(EnvError, match="too many actions. Expected a log of at most"):
            running.kept.state()
        assert len(running.kept.log) == 0

        running.do("reset", {})
        running.do("step", 1)
        if name == "replay (all)":
            with pytest.raises(EnvError, match="too many actions"):
                running.kept.state()
        else:
            successor(World, keeper, running)


def test_options_of_resets_count_in_a_log(monkeypatch):
    "A vector that resets by a mask has options in each reset. What is stored is within the bound."
    monkeypatch.setattr(KeptActions, "MOST", 2**18)
    monkeypatch.setattr(ActionLog, "CHUNK", 50)
    running = begun(World, Keeper("replay (all)"))
    constant = stored_bytes(running.kept.state())  # of the generators and the constructor
    most = 0
    with pytest.raises(EnvError, match="too many actions"):
        for t in range(10_000):
            running.kept.reset(options=dict(reset_mask=np.ones(64, bool)))
            running.kept.step(1)
            if t % 50 == 0:
                most = max(most, stored_bytes(running.kept.state()) - constant)
    assert 2**16 < most <= 2**18


@pytest.mark.parametrize(
    "x",
    [
        np.array(1.0),
        np.zeros((2, 6))[:, ::2],
        np.array([1j]),
        np.zeros(0),
        np.ones(3, ">f4"),
        np.array([True, False]),
        torch.arange(3),
        dict(a=np.arange(3), b=(np.ones(2), np.ones(1))),
    ],
    ids=repr,
)
def test_a_checksum_of_answers_is_that_of_all_bytes_in_turn(x):
    data = b"".join(np.asarray(leaf).tobytes() for leaf in nested.leaves(x))
    assert answer_checksum(x, 7) == zlib.crc32(data, 7)


def stored_bytes(state):
    return len(state["graph"]) + len(state["memory"])


def test_the_log_of_actions_is_small():
    running = begun(World, Keeper("replay (all)"))
    sizes = []
    for _ in range(2):
        for _ in range(5000):
            running.kept.step(1)
        sizes.append(len(running.kept.state()["memory"]))
    assert sizes[1] - sizes[0] == 5000


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


FIRST = itemgetter(0)
SECOND = itemgetter(1)
TABLE = np.arange(1.0, 7.0).reshape(3, 2)
CONSTANTS = {  # kind -> what makes a constant of a number, and what is read of it
    "array": (lambda n: np.full(2, n), SECOND),
    "row": (lambda n: TABLE[int(n) - 1], SECOND),
    "read by numpy": (lambda n: torch.full((2,), n).numpy(), SECOND),
    "tensor": (lambda n: torch.full((2,), n), SECOND),
    "network": (lambda n: torch.nn.Linear(1, 1), lambda x: x(torch.ones(1)).item()),
    "list": (lambda n: [n], FIRST),
    "set": (lambda n: {n}, max),
    "deque": (lambda n: deque([n], 2), FIRST),
    "dict": (lambda n: dict(n=n), itemgetter("n")),
    "bag": (bag, attrgetter("drawn")),
    "its own attributes": (Tagged, attrgetter("n")),
    "object": (lambda n: Thing(n=n), attrgetter("n")),
    "closure": (rule, lambda x: x()),
    "within": (lambda n: Thing(a=[dict(b=np.full(2, n))]), lambda x: x.a[0]["b"][1]),
}
SHARED = {kind: list(map(make, (1.0, 2.0, 3.0))) for kind, (make, _) in CONSTANTS.items()}


class Shared(World):
    "Each episode has one of three constants, which no environment changes."

    def __init__(self, kind):
        self.kind = kind

    def begin(self):
        self.level = SHARED[self.kind][self.np_random.integers(3)]

    def noise(self):
        return self.np_random.normal() + read_of(self.kind, self.level)


def read_of(kind, constant):
    _, read = CONSTANTS[kind]
    return float(read(constant))


@pytest.mark.parametrize("kind", SHARED)
def test_constants_of_a_class_or_module_stay_as_they_are(kind):
    "A new environment holds one constant, and the state another one."

    def numbers():
        return [read_of(kind, x) for x in SHARED[kind]]

    before = numbers()
    make = partial(Shared, kind)
    keeper = keeper_for(make)
    assert keeper.name.startswith("replay")
    running = begun(make, keeper, 1)
    for n in range(6):
        running.play(right, 20, 3, np.inf)
        new = restored(make, keeper, running)
        assert numbers() == before
        new.repeat(running.play(right, 20, n, np.inf))
        running = new
    assert numbers() == before


def test_an_environment_that_is_lent_is_left_alone():
    env = World()
    assert keeper_for(lambda: env).name == keeper_for(lambda: gym.Wrapper(env)).name == "none"
    assert not hasattr(env, "x")


# -- whole batches ----------------------------------------------------------------------------------------------------


def outcomes(batch, n, seed):
    "The bits of what a batch answers to random actions."
    space = batch.action_space
    space.seed(seed)
    bits = []
    for _ in range(n):
        act = torch.tensor([[space.sample() for _ in range(len(batch))]])
        out = batch.step(act)
        parts = [*out.state, out.term, out.final, out.ended, out.info, out.valid]
        bits.append(dict(bits_of(parts, "out")))
    return bits


def batches_of(make, n, name):
    "Two equal batches, which are kept in the way of this name. The first one is reset."
    factories = env_factories(make, n)
    keeper = keeper_for(lambda: factories[0](0))
    assert keeper.name == name
    batches = [
        env_batch(factories, np.random.SeedSequence(3), sticky=None, keeper=keeper)
        for _ in range(2)
    ]
    batches[0].reset()
    return batches


def state_of(batch):
    rows, t = batch._at
    row = rows.rows[t]
    return encoded(capture([batch.get_state(), row.state(()), row.term]))


def go_on(batch, state):
    own, row, term = restore_object(state)
    batch.set_state(own)
    batch._at = rows, _ = batch.rows(), 0
    rows.put(0, row, term)


# -- what does not fit ------------------------------------------------------------------------------------------------


def refused(text, make, state, name="copy"):
    with pytest.raises(EnvError, match=text):
        Keeper(name).begin(make()).restore(state)


def pole():
    return gym.make("CartPole-v1")


def copy_of(env):
    "The copy of an environment that is reset."
    env.reset(seed=0)
    return Keeper("copy").begin(env).state()


def test_states_that_do_not_fit_are_refused_by_name():
    "For environments of another class and for another keeper see the notebooks."
    state = copy_of(pole())
    refused("TimeLimit of .* got .*CartPoleEnv", lambda: pole().unwrapped, state)
    refused("another way.*got 'int'", World, 3)
    lacking = {**state, "graph": state["graph"].replace('"gravity"', '"gravitas"')}
    refused("leaf CartPoleEnv.gravity: the state lacks an attribute", pole, lacking)
    vector = partial(gym.make_vec, "CartPole-v1", vectorization_mode="sync")
    refused("does not fit this environment", lambda: vector(2), copy_of(vector(3)))
    keeper = Keeper("replay (all)")
    told = "Expected test_keeping.World, got test_keeping.Level"
    refused(told, Level, begun(World, keeper).kept.state(), keeper.name)


@pytest.mark.parametrize(
    "x", [iter([]), (i for i in ()), lambda: iter([]), Thing(n=1), threading.Thread(target=print)]
)
def test_a_copy_refuses_what_gymnasium_does_not_hold(x):
    "It names the attribute. A function without variables of its own is fine."
    env = pole()
    env.unwrapped.more = x
    if type(x) is FunctionType:
        copy_of(env)
        return
    with pytest.raises(EnvError, match="leaf CartPoleEnv.more: this cannot be copied. Got"):
        copy_of(env)


def test_a_model_that_was_changed_is_refused():
    "Its numbers are no part of the state."
    pytest.importorskip("mujoco")
    make = lambda: gym.make("InvertedPendulum-v5", disable_env_checker=True)
    keeper = keeper_for(make, seconds=0.1)
    assert keeper.name == "MuJoCo"
    env = make()
    env.reset(seed=3)
    keeper.begin(make()).restore(keeper.begin(env).state())
    env.unwrapped.model.body_mass[1] *= 1.5
    with pytest.raises(EnvError, match="leaf .*model: .*another one, or it was changed"):
        keeper.begin(make()).restore(keeper.begin(env).state())


def test_a_model_that_a_wrapper_changes_is_replayed():
    pytest.importorskip("mujoco")

    class Heavier(gym.Wrapper):
        n = 0

        def reset(self, **kwargs):
            self.n += 1
            if self.n % 12 == 0:
                self.unwrapped.model.body_mass[1] *= 1.5
            return self.env.reset(**kwargs)

    make = lambda: Heavier(gym.make("InvertedPendulum-v5", disable_env_checker=True))
    check(make, "replay (episode)")


def test_a_model_of_other_size_is_refused():
    pytest.importorskip("mujoco")
    env, other = (
        gym.make(name, disable_env_checker=True).unwrapped for name in ("Hopper-v5", "Ant-v5")
    )
    env.reset(seed=0)
    copies = copies_of(env_parts(env))
    with pytest.raises(EnvError, match="does not fit this environment"):
        put_copies(env_parts(other), [{**copies[0], "part": "gymnasium.envs.mujoco.ant_v5.AntEnv"}])


# -- plain data -------------------------------------------------------------------------------------------------------


class Hand(list):
    "A container of a class of its own."


def returned(x, *root):
    "Plain data, after they were in a checkpoint."
    return restore_object(encoded(capture(x)), *root)


@pytest.mark.parametrize("fresh", [None, [1], deque([1])])
def test_a_container_of_a_class_of_its_own_has_to_be_there(fresh):
    state = capture(dict(x=Hand([1, 2])))
    found = restore_object(state, dict(x=Hand()))["x"]
    assert (type(found), found) == (Hand, [1, 2])
    told = r"leaf state\['x'\]: .*Expected a test_keeping.Hand, .*got a \w+\.(NoneType|list|deque)"
    with pytest.raises(EnvError, match=told):
        restore_object(state, dict(x=fresh))


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
        again = returned([x], [fresh])[0]
        assert (type(again), again, repr(again)) == (type(x), x, repr(x))


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
        len,
        os.path.join,
        World,
        [].append,
        Thing(n=1),
    ],
)
def test_what_is_no_plain_data_is_refused(x):
    with pytest.raises(EnvError, match="no plain data. Got .*" + type(x).__name__):
        capture([x])


def test_a_container_with_attributes_is_refused():
    with pytest.raises(EnvError, match="a container with attributes .*Bag"):
        capture([bag(3)])


def test_generators_share_what_they_shared():
    "Those that spawn from one sequence of seeds draw different children."

    def world(seed):
        seeds = np.random.SeedSequence(seed)
        bits = np.random.Philox(seeds)
        return [seeds, bits, np.random.Generator(bits), np.random.Generator(bits)]

    def drawn(seeds, bits, one, two):
        numbers = [x.random() for x in (one, two, *two.spawn(2))]
        return numbers, bits.random_raw(), seeds.n_children_spawned

    old = world(3)
    new = world(4)
    old[2].spawn(2)
    assert returned(old, new) is new
    assert drawn(*new) == drawn(*old)
    _, bits, one, two = new
    assert one.bit_generator is two.bit_generator is bits


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
        restore_object(dict(graph=graph, memory=torch.zeros(8, dtype=torch.uint8)))


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
    if not isinstance(x, (dict, set, frozenset, list, tuple, deque)):
        return f"{type(x)} {x!r}"
    items = [text(y) for y in (x.items() if isinstance(x, dict) else x)]
    if isinstance(x, (set, frozenset)):
        items.sort()
    return f"{type(x)} {items} {getattr(x, 'maxlen', 0)}"


@may_be_new
class Holder:
    def __init__(self, **attributes):
        vars(self).update(attributes)


@settings(deadline=None, max_examples=150)
@given(trees, trees)
def test_plain_data_come_back(tree, other):
    assert text(returned(tree)) == text(tree)
    a = Holder(tree=tree, both=[tree])
    b = Holder(tree=other, both=[other])
    assert returned(a, b) is b
    assert text(vars(b)) == text(vars(a))
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
def test_views_of_one_memory_stay_views_of_one_memory(cuts, torchy, fresh, data):
    def world(seed, cuts):
        base = np.random.default_rng(seed).normal(size=(6, 2))
        base = torch.from_numpy(base) if torchy else base
        views = [base[i : j : abs(k)] if torchy else base[i:j:k].T for i, j, k in cuts]
        return dict(views=views, base=base)

    a = world(0, cuts)
    root = [world(1, data.draw(st.permutations(cuts)))] if fresh else []
    b = returned(a, *root)
    a["base"][data.draw(st.integers(0, 5))] = 7.0
    b["base"][:] = a["base"]
    assert_same(b, a)


def test_names_of_one_object_stay_names_of_one_object():
    def world(n):
        x = [n]
        at = np.full(2, n)
        w = dict(
            x=x,
            y=x,
            holder=Holder(a=x, b=at),
            array=at,
            colour=Colour(n),
            count=Counter("ab" * n),
            more=defaultdict(list, {n: [n]}),
            tensor=torch.full((2,), n),
        )
        w["me"], w["flat"] = w, w["tensor"].view(2, 1)
        # One array in the new environment, and two in the old one.
        w["apart"] = np.full(2, n) if n == 2 else at
        w["objects"] = np.array([x, w, None], object)
        return w

    old = world(2)
    new = world(1)
    at, more = new["array"], new["more"]
    returned(old, new)
    assert new["x"] is new["y"] is new["holder"].a is new["objects"][0] and new["x"] == [2]
    assert new["me"] is new["objects"][1] is new
    assert new["array"] is at is new["holder"].b and new["more"] is more
    assert more == {2: [2]} and more[5] == []
    assert (new["colour"], new["count"]) == (Colour.BLUE, Counter("abab"))
    new["array"][:] = 9
    new["tensor"][:] = 9
    assert new["apart"].tolist() == [2, 2] and new["flat"].tolist() == [[9], [9]]


def test_who_holds_an_array_sees_the_numbers_of_the_state():
    "An array, a tensor and a parameter get them in place; a view stays one, and a parameter learns on."

    def world(a):
        whole = a * torch.arange(4.0)
        w = torch.nn.Parameter(a * torch.ones(2))
        return dict(x=a * np.arange(3.0), w=w, whole=whole, part=whole[1:])

    fresh = world(0)
    held = dict(fresh)
    again = restore_object(capture(world(1)), fresh)
    assert all(again[name] is held[name] for name in ("x", "w", "whole"))
    assert_same(again, world(1))
    assert again["w"].requires_grad
    again["part"][0] = 9
    assert again["whole"][1] == 9


def test_a_class_that_is_gone_is_named():
    class Gone(enum.Enum):
        ONE = 1

    Gone.__module__, Gone.__qualname__ = "corridor", "Gone"
    with pytest.raises(EnvError, match="no Enum is called corridor.Gone"):
        restore_object(capture([Gone.ONE]))
