"""Kill trainings at random instants, resume them, and compare every number with those of trainings that were never interrupted.

    python benchmarks/guillotine.py [--only NAME ...] [--rounds 3] [--kills 3] [--jobs 2] [--seed 0] [--device cpu]

A case is a training that takes seconds. Its twin runs once without interruption. Then, in each round, the same training is killed
(SIGKILL) several times and resumed each time, with another number of workers where the case has some: at a random instant, within the
first batch after a resume, and while a checkpoint is written. Of several ranks, all are killed as soon as one is. The weights, the states
of pipes, every metric but those of a clock, and the evaluations have to be the same, bit for bit. A case that is expected to be inexact
has to say so when it starts, and when it goes on. One line is printed for each round. The exit status is 1 if a number differs.
"""

import argparse
import functools
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch

from rollpipe.agents.checkpoint import load_checkpoint
from rollpipe.pipes.data import nested
from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.keeping import files
from rollpipe.ranks import process_group
from rollpipe.runs import resume, start, train
from rollpipe.runs.folder import load_run
from rollpipe.runs.joint import joint
from rollpipe.settings import config as settings
from rollpipe.settings.config import make_config

CLOCKED = (
    "steps_per_s",
    "workers",
    "restarts",
)  # these, and what begins with "seconds", depend on time or on the number of workers


class Case(NamedTuple):
    """A training.

    Args:
        algorithm: see `rollpipe train`
        env: gymnasium id
        options: of the algorithm
        run: options of the run
        workers: numbers of workers that a resume may choose from
        inexact: part of the reason for which it begins new episodes; None: it goes on exactly
        ranks: number of processes that learn together
        start_method: of the workers; None: the usual one
    """

    algorithm: str
    env: str
    options: dict = {}
    run: dict = {}
    workers: tuple = (0,)
    inexact: str | None = None
    ranks: int = 1
    start_method: str | None = None


class Luck(gym.Env):
    "An environment that draws from the global generators of Python, numpy and torch."

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,))
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.look(), {}

    def step(self, action):
        return self.look(), random.random() * action, bool(np.random.random() < 0.1), False, {}

    def look(self):
        return np.float32(
            [random.random(), np.random.random(), float(torch.rand(())), self.np_random.normal()]
        )


class Clock(Luck):
    "An environment that cannot be kept: it shows the time."

    def look(self):
        return np.float32([time.perf_counter(), 0, 0, 0])


def normalized(**kwargs):
    return gym.wrappers.NormalizeObservation(gym.make("Pendulum-v1", **kwargs))


def pong():
    import ale_py

    gym.register_envs(ale_py)
    return gym.wrappers.AtariPreprocessing(
        gym.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    )


# A spawned worker imports the module that an id names.
sys.modules.setdefault("guillotine", sys.modules[__name__])
for name, make in dict(Luck=Luck, Clock=Clock, Normalized=normalized, Pong=pong).items():
    gym.register(f"guillotine/{name}-v0", make, max_episode_steps=200)

SMALL = dict(n_steps=64, n_envs=2, lanes=2)
CASES = {
    "ppo": Case("ppo", "CartPole-v1", SMALL, dict(steps=6000), (0, 1, 2)),
    "trpo": Case("trpo", "Pendulum-v1", SMALL, dict(steps=6000), (0, 1, 2)),
    "a2c": Case("a2c", "Acrobot-v1", dict(n_steps=16, n_envs=2, lanes=2), dict(steps=4000)),
    "ppo_mountain": Case("ppo", "MountainCarContinuous-v0", SMALL, dict(steps=5000)),
    "reinforce": Case("reinforce", "MountainCar-v0", SMALL, dict(steps=5000)),
    "vtrace_lag": Case(
        "vtrace",
        "CartPole-v1",
        dict(n_steps=32, n_envs=2, lanes=2),
        dict(steps=5000, lag=1, workers=2),
        (1, 2),
    ),
    "rnd": Case("ppo", "CartPole-v1", SMALL, dict(steps=4000, intrinsic=0.1)),
    "scaled": Case(
        "ppo", "Pendulum-v1", dict(SMALL, reward_scale="learn"), dict(steps=5000), (0, 2)
    ),
    "evaluated": Case(
        "ppo",
        "CartPole-v1",
        SMALL,
        dict(steps=5000, eval_every="1000 steps", eval_episodes=2, final_episodes=2),
    ),
    "taxi": Case("dqn", "Taxi-v4", {}, dict(steps=3000)),
    "dqn": Case("dqn", "CartPole-v1", dict(prioritized=True, warmup=200), dict(steps=2500)),
    "sac": Case("sac", "Pendulum-v1", dict(warmup=200), dict(steps=700)),
    "td3": Case("td3", "Pendulum-v1", dict(warmup=200), dict(steps=700)),
    **{
        name.lower(): Case("ppo", f"{name}-v5", SMALL, dict(steps=5000), (0, 2))
        for name in ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid")
    },
    "lunar": Case("ppo", "LunarLander-v3", SMALL, dict(steps=5000), (0, 2)),
    "bipedal": Case("ppo", "BipedalWalker-v3", SMALL, dict(steps=4000)),
    "ppo_ranks": Case(
        "ppo", "CartPole-v1", dict(SMALL, lanes=4), dict(steps=6000), (0, 1, 2), ranks=2
    ),
    "trpo_ranks": Case("trpo", "Pendulum-v1", SMALL, dict(steps=4000), (0, 1), ranks=2),
    "vtrace_ranks": Case(
        "vtrace",
        "CartPole-v1",
        dict(n_steps=32, n_envs=2, lanes=4),
        dict(steps=5000, lag=1, workers=1),
        (1, 2),
        ranks=2,
    ),
    "sac_ranks": Case(
        "sac",
        "Pendulum-v1",
        dict(warmup=200, lanes=2, samples_per_step=0.2),
        dict(steps=800),
        ranks=2,
    ),
    "dqn_ranks": Case("dqn", "CartPole-v1", dict(warmup=200, lanes=2), dict(steps=2500), ranks=2),
    "recurrent": Case(
        "ppo",
        "CartPole-v1",
        dict(SMALL, recurrent="gru", state_size=16),
        dict(steps=5000),
        (0, 1, 2),
    ),
    "recurrent_dqn": Case(
        "dqn",
        "CartPole-v1",
        dict(recurrent="lstm", state_size=16, length=8, warmup=200),
        dict(steps=1500),
    ),
    "masked": Case(
        "ppo", "Taxi-v4", dict(SMALL, action_mask="action_mask"), dict(steps=4000), (0, 2)
    ),
    "normalized": Case("ppo", "guillotine/Normalized-v0", SMALL, dict(steps=5000), (0, 2)),
    "global": Case("ppo", "guillotine/Luck-v0", SMALL, dict(steps=5000), (0, 2)),
    "global_spawn": Case(
        "ppo",
        "guillotine:guillotine/Luck-v0",
        SMALL,
        dict(steps=3000),
        (0, 1),
        start_method="spawn",
    ),
    "pong": Case(
        "ppo", "guillotine/Pong-v0", dict(SMALL, n_steps=16, lanes=1), dict(steps=320), (0, 1)
    ),
    "spawn": Case(
        "ppo", "Pendulum-v1", SMALL, dict(steps=5000, workers=2), (1, 2), start_method="spawn"
    ),
    "ray": Case("ppo", "CartPole-v1", SMALL, dict(steps=5000, workers=1, reading="ray"), (1, 2)),
    "clock": Case("ppo", "guillotine/Clock-v0", SMALL, dict(steps=3000), inexact="replay"),
    "ready": Case(
        "vtrace",
        "CartPole-v1",
        SMALL,
        dict(steps=3000, workers=2, lag=1, order="ready"),
        (2,),
        "the clock",
    ),
}


def quietly(case, function, *args):
    "Run a function in this process as a training of its own. Returns the exit code."
    warnings.simplefilter("ignore")
    if case.start_method:
        settings.ProcessReading = functools.partial(
            settings.ProcessReading, start_method=case.start_method
        )
    torch.set_num_threads(1)
    try:
        function(*args)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def begin(case, folder, seed):
    config = make_config(
        case.algorithm,
        case.env,
        dict(case.options),
        **{"checkpoint_every": 3, "seed": seed, **case.run},
    )
    # It may have been killed before its configuration was written: then it is overwritten.
    learn(
        lambda: start(
            folder, config | (dict(ranks=case.ranks) if case.ranks > 1 else {}), overwrite=True
        )
    )


def go_on(folder, workers):
    try:
        learn(lambda: resume(folder, workers=workers))
    except DataError as e:
        if "is complete" not in str(e):
            raise  # it was killed when it had come to its end


def learn(make):
    "Train the run that `make` starts or resumes, together with the other ranks if there are some."
    with process_group():
        run = joint(make, {}, dict)
        if run is not None:
            train(run, progress=False, tensorboard=False)


def in_child(blow, case, function, *args):
    """Run a function in a forked process for each rank, which `blow` may kill. Returns the exit code, negative if they were killed.

    Args:
        blow: ('time', seconds), ('saving', n: the n-th save of rank 0), or None
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        common = dict(
            WORLD_SIZE=str(case.ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free.getsockname()[1]),
            GLOO_SOCKET_IFNAME="lo",
        )

    def main(rank):
        os.environ.update(common, RANK=str(rank))
        if blow and blow[0] == "time":

            def kill():
                time.sleep(blow[1])
                os.kill(os.getpid(), signal.SIGKILL)

            threading.Thread(target=kill, daemon=True).start()
        if blow and blow[0] == "saving":
            die_while_saving(blow[1])
        os._exit(quietly(case, function, *args))

    children = [
        multiprocessing.get_context("fork").Process(target=main, args=(rank,))
        for rank in range(case.ranks)
    ]
    for child in children:
        child.start()
    end = None  # a rank whose memory takes long to free ends after one that has noticed its end
    while None in (codes := [child.exitcode for child in children]) and (
        end is None or time.monotonic() < end
    ):
        if end is None and any(codes):
            end = time.monotonic() + 5
        time.sleep(0.01)
    for child in children:
        if any(codes):
            child.kill()
        child.join()
    return -signal.SIGKILL if -signal.SIGKILL in codes else max(code or 0 for code in codes)


def die_while_saving(n):
    "Let this process be killed when it has written half of its `n`-th checkpoint."
    left = [n]
    opened = files._open_beside

    def open_beside(path):
        file, beside = opened(path)
        if path.name == "checkpoint.safetensors":
            left[0] -= 1
            if not left[0]:
                file.write = lambda data: (
                    type(file).write(file, data[: len(data) // 2]),
                    file.flush(),
                    os.kill(os.getpid(), signal.SIGKILL),
                )
        return file, beside

    files._open_beside = open_beside


def is_exact(name):
    return not name.startswith("seconds") and name not in CLOCKED


def numbers(folder) -> dict:
    "Everything that has to be the same: path -> value."
    found = load_checkpoint(Path(folder) / "checkpoint.safetensors")
    out = {}
    counters = {name: x for name, x in found.counters.items() if is_exact(name)}
    for name, tree in dict(
        agent=found.agent_state, pipes=found.pipes or {}, counters=counters
    ).items():
        out.update(zip(nested.paths(tree, name), nested.leaves(tree)))
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        path = Path(folder) / name
        for i, line in enumerate(path.read_text().splitlines() if path.exists() else ()):
            out.update(
                {f"{name}:{i + 1} {key}": x for key, x in json.loads(line).items() if is_exact(key)}
            )
    return out


def bits(x):
    return x.dtype, x.shape, x.contiguous().reshape(-1).view(torch.uint8).tolist()


def same(x, y) -> bool:
    if isinstance(x, torch.Tensor):
        return isinstance(y, torch.Tensor) and bits(x) == bits(y)
    if isinstance(x, float) and isinstance(y, float):
        return x.hex() == y.hex()
    return x == y


def differences(there, here) -> list:
    "The names of numbers that differ, or that only one side has."
    return [
        name
        for name in {**there, **here}
        if name not in there or name not in here or not same(there[name], here[name])
    ]


class Twin(NamedTuple):
    folder: Path
    seconds: float


class Round(NamedTuple):
    name: str
    number: int
    killed: int
    differ: list


def make_twin(case, root, seed) -> Twin:
    folder = Path(root) / "twin"
    begun = time.perf_counter()
    if code := in_child(None, case, begin, case, folder, seed):
        raise RuntimeError(f"the training failed (exit code {code})")
    inexact = load_run(folder, builds=False).history.inexact
    if (case.inexact is None) != (inexact is None) or case.inexact and case.inexact not in inexact:
        raise RuntimeError(f"expected to be inexact: {case.inexact}; got: {inexact}")
    return Twin(folder, time.perf_counter() - begun)


def one_round(case, twin, folder, rng, kills, seed) -> tuple:
    "Kill and resume one training until it is complete. Returns the numbers that differ, and how often it was killed."
    killed, seconds = 0, twin.seconds
    while not killed:
        shutil.rmtree(folder, ignore_errors=True)
        killed = kill_and_resume(case, seconds, folder, rng, kills, seed)
        seconds /= 2  # if it was complete before it could be killed: the machine was busy when its twin ran
    return differences(numbers(twin.folder), numbers(folder)), killed


def kill_and_resume(case, seconds, folder, rng, kills, seed) -> int:
    "Train until the end, with kills on the way. Returns how often the training was killed."
    code, killed = None, 0
    while code != 0:
        exists = (Path(folder) / "config.json").exists()
        blow = None
        if killed < kills:
            kind = ("time", "first", "saving")[killed % 3] if exists else "time"
            blow = {
                "time": ("time", rng.uniform(0.1, 0.8) * seconds),
                "first": ("time", rng.uniform(0.0, 0.3)),
                "saving": ("saving", rng.randint(1, 2)),
            }[kind]
        what = (go_on, folder, rng.choice(case.workers)) if exists else (begin, case, folder, seed)
        code = in_child(blow, case, *what)
        if code == -signal.SIGKILL:
            killed += 1
        elif code:
            raise RuntimeError(f"a resumed training failed (exit code {code})")
    return killed


def try_case(name, case, rounds, kills, seed) -> list:
    "A `Round` for each round."
    lines = []
    with tempfile.TemporaryDirectory() as root:
        twin = make_twin(case, root, seed)
        for k in range(rounds):
            rng = random.Random(f"{name} {seed} {k}")
            differ, killed = one_round(case, twin, Path(root) / f"run{k}", rng, kills, seed)
            if case.inexact:
                differ = []
            lines.append(Round(name, k, killed, differ))
    return lines


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=list(CASES))
    for option, default in (("rounds", 3), ("kills", 3), ("jobs", 2), ("seed", 0)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--device", default="cpu", help="where the networks are, such as cuda")
    args = parser.parse_args()
    cases = {
        name: case._replace(run=dict(case.run, device=args.device)) for name, case in CASES.items()
    }
    logging.getLogger("rollpipe").setLevel(logging.ERROR)
    total = bad = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = {
            name: pool.submit(try_case, name, cases[name], args.rounds, args.kills, args.seed)
            for name in args.only
        }
        for name, job in jobs.items():
            try:
                lines = job.result()
            except Exception as e:
                print(f"FAIL  {name}: {e}", flush=True)
                bad += 1
                continue
            for name, k, killed, differ in lines:
                total = total + killed
                bad = bad + bool(differ)
                print(
                    f"{'DIFFERS' if differ else 'same   '} {name} round {k}, killed {killed} times"
                    + (f": {len(differ)} numbers, first {differ[0]}" if differ else ""),
                    flush=True,
                )
    print(f"{total} kills, {bad} of the rounds or cases differ or fail")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
