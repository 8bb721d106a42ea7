"Environments and actors whose evaluations are known, or go wrong; used by the tests of evaluations in other processes."

import copy
import os
import random
import signal
import time

import gymnasium as gym
import numpy as np
import torch

from rollpipe.agents import evaluate
from rollpipe.layers import Actor, GaussianPolicy
from rollpipe.pipes.graph.modules import bump_version, version_of

PATIENCE = 60  # seconds after which a test that waits has failed


class Pays(gym.Env):
    "Pays the action at each step; episode `n` of an environment has `n` steps."

    observation_space = gym.spaces.Box(0, np.inf, (1,))
    action_space = gym.spaces.Box(-np.inf, np.inf, ())
    length = 0

    def reset(self, *, seed=None, options=None):
        self.length = self.length + 1
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(1, self.t, np.float32), float(action), self.t == self.length, False, {}


class Luck(Pays):
    "Pays what Python's, numpy's and torch's global generators draw."

    def step(self, action):
        return super().step(random.random() + 10 * np.random.rand() + 100 * float(torch.rand(())))


class Gated(Pays):
    "Leaves a note when it waits for a file, which lets it begin, and another one when it is closed."

    def __init__(self, gate):
        self.gate = gate

    def reset(self, **kwargs):
        if self.gate.parent.is_dir():
            self.gate.with_suffix(".waits").touch()
        while not self.gate.exists():
            time.sleep(0.01)
        return super().reset(**kwargs)

    def close(self):
        if self.gate.parent.is_dir():
            self.gate.with_suffix(".closed").touch()


class Fails(Pays):
    "Calls a function before it pays."

    def __init__(self, function):
        self.function = function

    def step(self, action):
        self.function()
        return super().step(action)


class Locked(Pays):
    "With a lock it cannot be pickled."

    def __init__(self, lock):
        pass


class Constant(Actor):
    "The action is the weight, which is there many times over; -1 if they differ."

    def __init__(self, n=1):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(n))

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        same = (self.weight == self.weight[0]).all()
        return torch.where(same, self.weight[0], -1.0).expand(fin.shape), (), {}


class Counts(Actor):
    "Acts what it counts in its recurrent state, and much more in training mode, or with noise."

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual, noise=None):
        hx = torch.zeros(1, fin.shape[1], 1) if hx is None else hx + 1
        return hx[..., 0] + 100 * self.training + (0 if noise is None else 1000 * noise), hx, {}

    def reset(self, hx, at):
        hx = hx.clone()
        hx[:, at] = 0
        return hx

    def draw_noise(self, lead, generator):
        return torch.ones(lead)


class Plain:
    "No module."

    def step(self, stepno, obs, act, rew, fin, /, *, hx, virtual):
        return torch.ones(fin.shape), (), {}

    def reset(self, hx, at):
        return hx


class Odd(Exception):
    "Cannot be unpickled."

    def __init__(self, a, b):
        super().__init__(a)


def boom():
    raise ZeroDivisionError("boom")


def odd():
    raise Odd(1, 2)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    os._exit(3)


def train(actor):
    "One update: the weights are those of the version."
    with torch.no_grad():
        actor.weight += 1
    bump_version(actor)


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def begun(evaluation, gate=None):
    "Wait until the process has started; if a `Gated` environment waits for a `gate`, until it does so."

    def heard():
        assert evaluation.poll() == []
        return evaluation.worker.has_started and (
            gate is None or gate.with_suffix(".waits").exists()
        )

    until(heard)


def same(found, expected):
    return all((x == y).all() for x, y in zip(found, expected))


def check_same_as_here(Evaluation):
    "Each answer is what `evaluate` gives for a copy of the weights of its version; evaluating changes nothing here."
    torch.manual_seed(1)
    actor = GaussianPolicy.for_env("Pendulum-v1", hidden=(8,), normalize=True)
    options = dict(n_episodes=3, n_envs=2, seed=5)
    options["env_kwargs"] = dict(max_episode_steps=20)
    states = {}
    before = torch.get_rng_state()
    with Evaluation("Pendulum-v1", actor, **options) as evaluation:
        for k in range(3):
            with torch.no_grad():
                for x in actor.parameters():
                    x.add_(0.1 * k)
            for x in actor.buffers():
                if x.is_floating_point():
                    x.add_(0.1 * k)
            bump_version(actor)
            states[version_of(actor)] = copy.deepcopy(actor)
            evaluation.request()
            [answer] = evaluation.wait(PATIENCE)
            assert (
                answer.version == version_of(actor) == k + 1
                and answer.seconds > 0
                and actor.training
            )
        assert (torch.get_rng_state() == before).all()
        evaluation.request()
        [again] = evaluation.wait(PATIENCE)
    assert same(again.evaluation, answer.evaluation) and all(
        x.flags.writeable for x in again.evaluation
    )
    returns = [evaluate("Pendulum-v1", x, **options).returns for x in states.values()]
    assert (returns[-1] == answer.evaluation.returns).all() and (returns[0] != returns[-1]).any()
