"""Environments of which a process should have one at a time, and others that a start must treat with care. `--import lonely_envs`."""

import os

import gymnasium as gym
import numpy as np


class Walk(gym.Env):
    "A walk on a line, which pays 1 for each of 30 steps. A subclass says how an episode begins (`begin`)."

    observation_space = gym.spaces.Box(-5, 5, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    length = 30

    def begin(self, seed):
        self.x = self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.begin(seed)
        self.t = 0
        return self.x.copy(), {}

    def step(self, action):
        self.x = np.clip(self.x + (0.1 if action else -0.1), -5, 5).astype(np.float32)
        self.t += 1
        return self.x.copy(), 1.0, False, self.t == self.length, {}


class OneClock(Walk):
    "All instances share the clock of one simulator. Alone, an episode returns 30, and beside others more."

    clock = [0]

    def begin(self, seed):
        super().begin(seed)
        self.seen = self.clock[0]

    def step(self, action):
        self.clock[0] += 1
        reward = self.clock[0] - self.seen
        self.seen = self.clock[0]
        observation, _, *rest = super().step(action)
        return (observation, float(reward), *rest)


class OneWorld(Walk):
    "All instances move the same body, which the `reset` of each of them puts elsewhere."

    world = {}

    def begin(self, seed):
        super().begin(seed)
        self.world["x"] = self.x

    def step(self, action):
        self.x = self.world["x"]
        answer = super().step(action)
        self.world["x"] = self.x
        return answer


class OneCounter(Walk):
    "Instances share the number of their episodes, which only an info tells."

    episodes = [0]

    def begin(self, seed):
        super().begin(seed)
        self.episodes[0] += 1

    def step(self, action):
        *answer, _ = super().step(action)
        return *answer, {"episodes": self.episodes[0]}


class OneDice(Walk):
    "Instances draw from one generator, which belongs to no seed."

    dice = np.random.default_rng(7)

    def step(self, action):
        observation, _, *rest = super().step(action)
        return (observation, float(self.dice.random()), *rest)


class GlobalDice(Walk):
    "Draws from numpy's global generator."

    def step(self, action):
        observation, _, *rest = super().step(action)
        return (observation, np.random.random(), *rest)


class OnlyOne(Walk):
    "A process may have one at a time, as with some emulators."

    alive = 0

    def __init__(self):
        if OnlyOne.alive:
            raise RuntimeError("cannot create a second emulator in this process")
        OnlyOne.alive += 1

    def close(self):
        OnlyOne.alive = 0


class OnlyOneRuns(Walk):
    "A process may have several, of which one may run: it takes a port at its first reset."

    taken = []

    def begin(self, seed):
        super().begin(seed)
        if self not in self.taken:
            if self.taken:
                raise RuntimeError("the port is in use")
            self.taken.append(self)

    def close(self):
        self.taken.clear()


class OnlyOneHidden(OnlyOne):
    "Only one, and its state is in an iterator."

    def begin(self, seed):
        super().begin(seed)
        self.moves = iter([])
        self.view = memoryview(bytearray(os.urandom(8)))

    def step(self, action):
        observation, _, *rest = super().step(action)
        return (observation, float(self.view[0]), *rest)


class CloseFails(Walk):
    "Its `close` fails before the first reset and after it."

    def close(self):
        self.window.close()


class IfSeed(Walk):
    "`if seed:` in place of `if seed is not None:`, and an object that cannot be written down."

    generator = None

    def __init__(self):
        self.view = memoryview(bytearray(8))

    def begin(self, seed):
        if seed:
            self.generator = np.random.default_rng(seed)
        elif self.generator is None:
            self.generator = np.random.default_rng()
        self.x = self.generator.uniform(-1, 1, 2).astype(np.float32)


class NeedsSeed(IfSeed):
    "Reproducible only if each `reset` gets a seed."

    def begin(self, seed):
        self.generator = None
        super().begin(seed)


class Clocked(Walk):
    "An info that is never the same twice, and one that is a text."

    def step(self, action):
        *answer, _ = super().step(action)
        return *answer, {"noise": np.random.default_rng().random(), "name": os.urandom(4).hex()}


class Counted(Walk):
    "Writes a line for each instance into a file, whatever process makes it."

    def __init__(self):
        with open(os.environ["COUNTED"], "a") as file:
            file.write(f"{os.getpid()}\n")


KINDS = [
    OneClock,
    OneWorld,
    OneCounter,
    OneDice,
    GlobalDice,
    OnlyOne,
    OnlyOneRuns,
    OnlyOneHidden,
    CloseFails,
    IfSeed,
    Counted,
]
for kind in KINDS:
    gym.register(f"{kind.__name__}-v0", kind)
