"""Small runs that tests begin with: each is trained once in a session, for all processes of pytest-xdist, and copied for a test.

A test that patches what a training does asks for its copy before. What is trained, read and compared in tests of runs stands here as well.
"""

import fcntl
import hashlib
import multiprocessing
import os
import random
import shutil
import signal
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch

from rollpipe.pipes.data.errors import DataError
from rollpipe.pipes.data.nested import first_difference
from rollpipe.pipes.keeping.random_states import GlobalRandomStates
from rollpipe.runs import fork, replayed_run, resume, start, train
from rollpipe.runs.folder import load_run
from rollpipe.runs.logs import read_records
from rollpipe.runs.states import edited
from rollpipe.settings.config import make_config
from rollpipe.traces.differences import diff
from rollpipe.traces.journal import read_journal

POLE = "CartPole-v1"
PENDULUM = "Pendulum-v1"
SMALL = dict(n_steps=16, n_envs=2, hidden=(8,), engine="torch")
OF_PPO = dict(SMALL, critic_hidden=(8,), epochs=2)


class Case(NamedTuple):
    "A small training: its algorithm, its environment and the options of the algorithm."

    algorithm: str
    env: str
    options: dict


OF_DQN = dict(warmup=32, capacity=64, batch_size=8, prioritized=True, beta_steps=200, lanes=2)
OF_SAC = dict(warmup=32, random_steps=32, batch_size=8, samples_per_step=0.25, critic_hidden=(8,))
CASES = {
    "trpo": Case("trpo", PENDULUM, dict(SMALL, critic_hidden=(8,))),
    "pole_trpo": Case("trpo", POLE, dict(SMALL, critic_hidden=(8,))),
    "ppo": Case("ppo", POLE, OF_PPO),
    "dqn": Case("dqn", POLE, {**SMALL, "n_steps": 4, **OF_DQN}),
    "sac": Case("sac", PENDULUM, {**SMALL, "n_steps": 4, **OF_SAC}),
    "lanes": Case("ppo", POLE, dict(OF_PPO, lanes=2)),
    "decay": Case("ppo", POLE, dict(OF_PPO, decay_steps=10_000)),
    "pair": Case("ppo", POLE, dict(OF_PPO, lanes=2, decay_steps=4000)),
    "recurrent": Case("ppo", POLE, dict(OF_PPO, recurrent="gru", state_size=6, decay_steps=10_000)),
    "masked": Case("ppo", "MaskedWalk-v0", dict(OF_PPO, action_mask="mask")),
}


class MaskedWalk(gym.Env):
    "A walk on ten places. At both ends, one of the two actions is not allowed."

    observation_space = gym.spaces.Dict(
        place=gym.spaces.Box(0, 9, (1,)), mask=gym.spaces.MultiBinary(2)
    )
    action_space = gym.spaces.Discrete(2)

    def look(self):
        return dict(
            place=np.float32([self.place]),
            mask=np.int8([self.place > 0, self.place < 9]),
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(10))
        return self.look(), {}

    def step(self, action):
        self.place += 2 * int(action) - 1
        return self.look(), float(self.place == 9), False, False, {}


gym.register("MaskedWalk-v0", MaskedWalk, max_episode_steps=12)


class OfAProcess(gym.Wrapper):
    """Observations that depend on the process, which no test within one process can find.

    It tells its state, because a replay of its actions would find that they are others.
    """

    def step(self, action):
        obs, *rest = self.env.step(action)
        return obs * np.float32(1 + os.getpid() % 1000 / 1e6), *rest

    def get_state(self):
        names = ("state", "steps_beyond_terminated", "_np_random")
        return {name: getattr(self.unwrapped, name) for name in names}

    def set_state(self, state):
        vars(self.unwrapped).update(state)


def of_a_process():
    return OfAProcess(gym.make(POLE).unwrapped)


gym.register("OfAProcess-v0", lambda **_: of_a_process(), max_episode_steps=500)


# -- trainings ---------------------------------------------------------------------------------------------------------


def config_of(name, **run):
    "The configuration of a case, with checkpoints every five updates."
    case = CASES[name]
    run = {"steps": 10_000, "checkpoint_every": 5, **run}
    return make_config(case.algorithm, case.env, case.options, **run)


def quietly(run, *edits, **kwargs):
    "Train a run, with these edits of its graph, and show nothing. Returns the run."
    run = edited(run, *edits)
    train(run, progress=False, tensorboard=False, **kwargs)
    return run


def trained(folder, name="ppo", steps=800, edits=(), **run):
    "Train a case in a new folder."
    return quietly(start(folder, config_of(name, steps=steps, **run)), *edits)


def gone_on(folder, *edits, callbacks=(), **changes):
    "Resume a run, with these changes of its options, and train it to its end."
    return quietly(resume(folder, **changes), *edits, callbacks=callbacks)


def interrupted(folder, at, **changes):
    "Resume a run, which is interrupted after this update, by Ctrl-C."

    def interrupt(run, record):
        if record["updates"] == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gone_on(folder, callbacks=[interrupt], **changes)


def in_a_process(main, status=0):
    "Call a function in another process, whose global generators have other states, and which ends with this status."

    def seeded():
        random.seed(99)
        np.random.seed(99)
        torch.manual_seed(99)
        main()

    child = multiprocessing.get_context("fork").Process(target=seeded)
    child.start()
    child.join(60)
    assert child.exitcode == status


def killed_in(update, make):
    "Train the run that `make` starts or resumes, in another process, which is killed in this update, before it is saved."

    def main():
        def callback(run, record):
            if record["updates"] == update:
                os.kill(os.getpid(), signal.SIGKILL)

        quietly(make(), callbacks=[callback])

    in_a_process(main, -signal.SIGKILL)


# -- comparisons -------------------------------------------------------------------------------------------------------


def again(folder, update, *edits):
    "Make an update of a run again. Returns what is told of it; another outcome is an error."
    with replayed_run(folder, update, *edits) as moment:
        return moment.outcome(moment.agent.update(moment.batch))


def updates_of(folder):
    "How many updates the newest checkpoint of a run has."
    return load_run(folder).counters["updates"]


def numbers(folder):
    "The metrics of a run, without those of the clock and of the workers."
    of_the_clock = ("seconds", "steps_per_s", "workers", "restarts")
    return [
        {name: x for name, x in record.items() if not name.startswith(of_the_clock)}
        for record in read_records(folder)
    ]


def check_same(a, b):
    "All numbers of two runs are equal: journal, metrics, learner, stream."
    found = diff(a, b)
    one = load_run(a)
    other = load_run(b)
    assert found.is_equal and found.common == one.counters["updates"] == other.counters["updates"]

    # Checksums of the batches and the weights, where both have a line
    mine, theirs = (
        {entry.updates: (entry.batch, entry.weights) for entry in read_journal(x / "journal.jsonl")}
        for x in (a, b)
    )
    common = mine.keys() & theirs.keys()
    assert common and all(mine[n] == theirs[n] for n in common)
    assert repr(numbers(a)) == repr(numbers(b))

    # The learner, and the stream, but for the recording, of which each has one of its own
    assert first_difference(one.agent_state, other.agent_state) is None
    for checkpoint in (one, other):
        checkpoint.stream["pipes"].pop("Recorder", None)
    assert first_difference(one.stream, other.stream) is None


def refused(text, call, *args, error=DataError, **kwargs):
    "The call raises an error with this text, a pattern, or with any text. Returns the error."
    with pytest.raises(error, match=text or None) as e:
        call(*args, **kwargs)
    return e.value


def files_of(folder):
    "Every file in a folder -> its bytes."
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def content(folder):
    "Everything in a folder, with the times of its files."
    return [
        (
            path,
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).digest() if path.is_file() else os.listdir(path),
        )
        for path in sorted(folder.rglob("*"))
    ]


# -- the gallery -------------------------------------------------------------------------------------------------------

EVALUATED = dict(eval_every="64 steps", eval_episodes=2, final_episodes=2)
# Ten updates of the learners on fragments, and more of those with a memory
RUNS = {
    "ppo": dict(steps=320, keep=2),
    "sac": dict(steps=320, keep=2),
    "dqn": dict(steps=320, keep=9),
    "trpo": dict(steps=320, keep=2),
    "lagging": dict(case="dqn", steps=320, keep=3, workers=2, lag=1),
    "recurrent": dict(steps=320, keep=2),
    "masked": dict(steps=320, keep=2),
    "recorded": dict(case="ppo", steps=320, keep=2, record=True),
    "evaluated": dict(case="ppo", steps=320, keep=9, **EVALUATED),
    "forked": dict(of="ppo", at=7, lr=0.01),
    "pole": dict(case="ppo", steps=800, keep=2),  # long enough for branches
    "pole_trpo": dict(steps=160),
}


class Gallery:
    "The runs of `RUNS`, in a folder that the processes of a session share."

    def __init__(self, home):
        self.home = home

    def original(self, name):
        "The folder of a run, which nobody changes. It is trained if it is not there; another process waits meanwhile."
        folder = self.home / name
        self.home.mkdir(exist_ok=True)
        with open(self.home / f".{name}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not folder.exists():
                half = self.home / f".{name}"
                shutil.rmtree(half, ignore_errors=True)
                with GlobalRandomStates():
                    self.train(half, **{"case": name, **RUNS[name]})
                half.rename(folder)
        return folder

    def train(self, folder, case, of=None, at=None, **run):
        "Train a case, or what a fork of another run becomes."
        if of is None:
            trained(folder, case, **run)
        else:
            gone_on(fork(self.original(of), folder, at, **run))

    def copy(self, name, folder):
        "A copy of a run in a new folder, which a test may change. Returns the folder."
        return Path(shutil.copytree(self.original(name), folder))


def home_of(tmp_path_factory):
    "The folder of the gallery: that of the session, which all processes of pytest-xdist share."
    home = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        home = home.parent
    return home / "gallery"
