"Pipelines to be run in worker processes, environments that do harm in one of them, and ways to compare streams; used by several tests."

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from functools import cache
from itertools import islice
from multiprocessing import current_process
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from forked import Forked
from gymnasium.spaces import Box, Discrete
from reference import snapshot
from toys import Counting, Limit, Lively, Memory, Nested, NestedMemory, Plain, Shaky, Stepped

from rollpipe.agents.natural_gradient import TRPO
from rollpipe.layers import Critic, GaussianPolicy, RecurrentPolicy
from rollpipe.pipes import (
    EnvStepper,
    EpisodeCollector,
    FragmentCollector,
    FrameStack,
    Lanes,
    Pipe,
    on_policy,
    rollouts,
)
from rollpipe.pipes.graph.modules import bump_version
from rollpipe.pipes.graph.torchdata import DataLoader2

HERE = Path(__file__).parent
SPACES = Lively.observation_space, Lively.action_space


class Images(Stepped):
    "8 x 8 images whose pixels count the steps."

    observation_space = Box(0, 255, (8, 8), np.uint8)
    action_space = Discrete(5)

    def begin(self):
        self.first = int(self.np_random.integers(50))

    def look(self):
        return np.full((8, 8), self.first + self.count, np.uint8)

    def pay(self, action):
        return float(action)

    def ends(self):
        return False, self.count == 7


class Global(Stepped):
    "An environment of the kind that draws from the global generators of Python, numpy and torch."

    observation_space = Box(-np.inf, np.inf, (4,))
    action_space = Discrete(5)

    def look(self):
        return np.float32([random.random(), np.random.random(), float(torch.rand(())), self.count])

    def pay(self, action):
        return random.random()

    def ends(self):
        return np.random.random() < 0.1, False


class Dim(Plain):
    "`Plain`, for images."

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        return (obs[..., 0, 0].long() + stepno) % 5, (), {}


class Unequal(Pipe):
    "Lane k gives 2 k + 1 items."

    lane = 0

    def set_lane(self, lane, seed):
        self.lane = lane

    def stream(self, items):
        yield from islice(items, 2 * self.lane + 1)


# name -> function of the number of lanes that gives (pipeline, actor)


def _recipe(actor, make=on_policy, source=Lively, **kwargs):
    options = dict(n_envs=2, n_steps=6, seed=3) | kwargs
    return make(source, actor, **options), actor


def _above(source, actor, lanes, wrap, **kwargs):
    return Lanes(wrap(EnvStepper(source, actor, 2, **kwargs)), lanes, 3), actor


def gaussian(lanes):
    return _recipe(
        GaussianPolicy.for_env(SPACES, hidden=(8,), seed=0),
        critic=Critic.for_env(SPACES, seed=0),
        lanes=lanes,
    )


def recurrent(lanes):
    return _recipe(
        RecurrentPolicy.for_env(SPACES, hidden=(5,), memory=6, past=True, seed=1),
        rollouts,
        lanes=lanes,
    )


def memory(lanes):
    return _recipe(Memory(), rollouts, Counting, lanes=lanes)


def global_generator(lanes):
    return _recipe(Shaky(), rollouts, lanes=lanes)


def nested(lanes):
    return _recipe(NestedMemory(), rollouts, Nested, lanes=lanes)


def vector(lanes):
    return _recipe(Cart(), rollouts, "CartPole-v1", vector="sync", lanes=lanes)


def global_env(lanes):
    return _recipe(Plain(), rollouts, Global, lanes=lanes)


def finite(lanes):
    return _above(Counting, Plain(), lanes, lambda p: Limit(FragmentCollector(p, 3), 2))


def unequal(lanes):
    return _above(Counting, Plain(), lanes, lambda p: Unequal(FragmentCollector(p, 3)))


def episodes(lanes):
    return _above(
        Lively, Shaky(), lanes, lambda p: EpisodeCollector(p, 2, pad=True), terminal_obs=True
    )


def episode_lists(lanes):
    return _above(Counting, Memory(), lanes, lambda p: EpisodeCollector(p, 3), terminal_obs=True)


def frames(lanes):
    return _above(Images, Dim(), lanes, lambda p: FrameStack(FragmentCollector(p, 5), 3))


def mapped(lanes):
    return _above(Counting, Plain(), lanes, lambda p: FragmentCollector(p, 3).map(Doubled()))


class Doubled:
    "A function with a state of its own, that is no module."

    def __call__(self, fragment):
        return fragment._replace(ret=2 * fragment.state.rew[1:])


class Cart(Plain):
    "Discrete(2) actions."

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        return (obs[..., 2] > 0).long(), (), {}


WORLDS = dict(
    gaussian=gaussian,
    recurrent=recurrent,
    memory=memory,
    global_generator=global_generator,
    nested=nested,
    vector=vector,
    finite=finite,
    unequal=unequal,
    episodes=episodes,
    episode_lists=episode_lists,
    frames=frames,
    mapped=mapped,
    global_env=global_env,
)


def change(actor):
    "As an update would: other weights, and the count."
    with torch.no_grad():
        for k, x in enumerate(actor.parameters()):
            x.add_(0.01 * (k + 1))
    bump_version(actor)


def stream(world, service, n=4, lanes=3):
    "Snapshots of the first `n` batches, after each of which the actor changes; `world` is a name or a function."
    pipe, actor = WORLDS.get(world, world)(lanes)
    found = []
    with DataLoader2(pipe, reading_service=service) as loader:
        for batch in islice(loader, n):
            found.append(snapshot(batch))
            change(actor)
    return found


@cache
def serial(world, n=4):
    "The stream of `world`, a name, without a reading service, made once."
    return stream(world, None, n)


def learned(service, n=20):
    "The batches of `n` TRPO updates, then the weights of actor and critic."
    actor = GaussianPolicy.for_env(SPACES, hidden=(8,), seed=0)
    critic = Critic.for_env(SPACES, hidden=(8,), seed=0)
    agent = TRPO(actor, critic, cg_iters=3, critic_epochs=1, seed=0)
    found = []
    with DataLoader2(
        on_policy(Lively, actor, critic, n_envs=2, n_steps=8, lanes=3, seed=5),
        reading_service=service,
    ) as loader:
        for batch in islice(loader, n):
            found.append(snapshot(batch))
            assert agent.update(batch)["lag"] == 0
    return found, [snapshot(dict(m.state_dict())) for m in (actor, critic)]


@cache
def learned_serially():
    "The same without a reading service, made once."
    return learned(None)


def outcome(pipe, service, n=6):
    "What `n` items of `pipe` raise, with the exception's text and that of its cause."
    try:
        with DataLoader2(pipe, reading_service=service) as loader:
            for _ in islice(loader, n):
                pass
    except Exception as e:
        return e, str(e), str(e.__cause__)
    return None, "", ""


# --- harm

CALLS = "factory", "reset", "step", "close"


def here(worker):
    return current_process().name == worker


class Harmful(gym.Env):
    """Takes `n` random steps an episode; `harm` is done at the `at`-th call (from 1) of `call`, in the process `worker`."""

    observation_space = Box(-np.inf, np.inf, (3,))
    action_space = Box(-1, 1, (2,))

    def __init__(self, harm, call, at=1, worker="worker 1"):
        self.harm = harm
        self.call = call
        self.at = at
        self.worker = worker
        self.calls = dict.fromkeys(CALLS, 0)
        self.noted("factory")

    def noted(self, call):
        self.calls[call] += 1
        if call == self.call and self.calls[call] == self.at and here(self.worker):
            do(self.harm)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.noted("reset")
        self.count = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.noted("step")
        self.count += 1
        return np.full(3, self.count, np.float32), 1.0, False, self.count == 5, {}

    def close(self):
        self.noted("close")


def do(harm):
    "raise, leave, hang (in C), hold the interpreter's lock (in C), or be killed by a signal; the variable HARM names a file for the time."
    if "HARM" in os.environ:
        Path(os.environ["HARM"]).write_text(repr(time.monotonic()))
    if harm == "raise":
        raise ZeroDivisionError("an accident")
    if harm == "leave":
        raise SystemExit(5)
    if harm == "hang":
        time.sleep(600)
    if harm == "hold":
        ctypes.PyDLL(None).sleep(600)
    if harm.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, harm))
        time.sleep(600)
    raise AssertionError(harm)


class HarmfulPipe(Pipe):
    "Does `harm` instead of the `at`-th item (from 1), or at its end ('close'); 'unpicklable': gives an item of that kind."

    def __init__(self, pipe, harm, at=1, worker="worker 1"):
        super().__init__(pipe)
        self.harm = harm
        self.at = at
        self.worker = worker

    def stream(self, items):
        try:
            for k, item in enumerate(items, 1):
                if k == self.at and here(self.worker):
                    if self.harm == "unpicklable":
                        item = item._replace(env={"a generator": (x for x in ())})
                    else:
                        do(self.harm)
                yield item
        finally:
            if self.at == "close" and here(self.worker):
                do(self.harm)


class HarmfulActor(Shaky):
    "Does `harm` at its `at`-th answer that is not virtual."

    def __init__(self, harm, at=1, worker="worker 1"):
        super().__init__()
        self.harm = harm
        self.at = at
        self.worker = worker
        self.count = 0

    def forward(self, *args, **kwargs):
        self.count += not kwargs["virtual"]
        if self.count == self.at and here(self.worker):
            do(self.harm)
        return super().forward(*args, **kwargs)


def harmful(harm, call, at=1, lanes=2, n_steps=4, worker="worker 1"):
    "A pipeline of `lanes` that does `harm`: in `call` 'factory', 'reset', 'step', 'close' of an environment, 'actor' or 'pipe'."
    source = (lambda: Harmful(harm, call, at, worker)) if call in CALLS else Lively
    actor = HarmfulActor(harm, at, worker) if call == "actor" else Shaky()
    pipe = FragmentCollector(EnvStepper(source, actor), n_steps)
    return Lanes(HarmfulPipe(pipe, harm, at, worker) if call == "pipe" else pipe, lanes, 0)


# --- other programs


def environment():
    path = os.pathsep.join(
        [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def forked_script(tmp_path, text, *args):
    "Start a program of its own, in a session of its own, without an interpreter of its own."
    file = tmp_path / "script.py"
    file.write_text(text)
    return Forked([file, *args], environment(), start_new_session=True)


def script(tmp_path, text, *args, name="script.py", **kwargs):
    "The same with an interpreter of its own, for tests that look at its start or its end."
    file = tmp_path / name
    file.write_text(text)
    return subprocess.Popen(
        [sys.executable, str(file), *map(str, args)],
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        **kwargs,
    )


def slack() -> float:
    "By how much slower things are on this machine at the moment than on an idle one."
    return max(1.0, 2 * os.getloadavg()[0] / os.cpu_count())


def gone(pids, within):
    "Those of `pids` that still run after `within` seconds."
    start = time.monotonic()
    while left := [pid for pid in pids if runs(pid)]:
        if time.monotonic() - start > within:
            return left
        time.sleep(0.02)
    return []


def runs(pid) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
