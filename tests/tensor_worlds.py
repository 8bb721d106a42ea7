"""Environments whose batch is made of tensors: two of gymnasium's written for torch, one of which every number can be predicted."""

import math
from functools import partial

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from toys import Counting, InTensors, Nested, factories

from rollpipe.pipes import TensorEnv, nested


class Simulated(TensorEnv):
    "Base of the simulated ones: the first states are uniform numbers, and episodes are cut off after `max_steps`."

    def __init__(self, n_envs=1, max_steps=None, dtype=torch.float32, device="cpu"):
        self.n_envs = n_envs
        self.dtype = dtype
        self.device = device
        self.max_steps = self.max_steps if max_steps is None else max_steps

    def reset(self, seed):
        self.generator, self.steps = (
            torch.Generator(self.device).manual_seed(seed),
            torch.zeros(self.n_envs, dtype=torch.int32, device=self.device),
        )
        self.state = self.begin()
        return self.look(self.state)

    def uniform(self, n):
        return torch.rand(
            n, self.n_envs, generator=self.generator, dtype=self.dtype, device=self.device
        )

    def step(self, act):
        state, rew, term = self.move(act)
        self.steps += 1
        trunc = self.steps >= self.max_steps
        over = term | trunc
        final = self.look(state)
        self.state = torch.where(over, self.begin(), state)  # nobody asks whether there is any
        self.steps.masked_fill_(over, 0)
        return self.look(self.state), rew, term, trunc, final, {}


class CartPole(Simulated):
    "gymnasium's CartPole-v1."

    high = np.array([4.8, np.inf, 24 * math.pi / 180, np.inf], np.float32)
    observation_space = Box(-high, high)
    action_space = Discrete(2)
    max_steps = 500

    def begin(self):
        return self.uniform(4) * 0.1 - 0.05

    def look(self, state):
        return state.t().float()

    def move(self, act):
        x, x_dot, theta, theta_dot = self.state
        force = act.to(self.dtype) * 20 - 10
        cos = theta.cos()
        sin = theta.sin()
        temp = (force + 0.05 * theta_dot.square() * sin) / 1.1
        acc = (9.8 * sin - cos * temp) / (0.5 * (4 / 3 - 0.1 * cos.square() / 1.1))
        x_acc = temp - 0.05 * acc * cos / 1.1
        state = torch.stack(
            [
                x + 0.02 * x_dot,
                x_dot + 0.02 * x_acc,
                theta + 0.02 * theta_dot,
                theta_dot + 0.02 * acc,
            ]
        )
        term = (state[0].abs() > 2.4) | (state[2].abs() > 12 * 2 * math.pi / 360)
        return state, torch.ones(self.n_envs, device=self.device), term


class Pendulum(Simulated):
    "gymnasium's Pendulum-v1."

    high = np.array([1, 1, 8], np.float32)
    observation_space = Box(-high, high)
    action_space = Box(-2, 2, (1,))
    max_steps = 200

    def begin(self):
        return (self.uniform(2) * 2 - 1) * torch.tensor(
            [[math.pi], [1.0]], dtype=self.dtype, device=self.device
        )

    def look(self, state):
        return torch.stack([state[0].cos(), state[0].sin(), state[1]], -1).float()

    def move(self, act):
        theta, speed = self.state
        u = act[:, 0].clamp(-2, 2).to(self.dtype)
        cost = (
            ((theta + math.pi) % (2 * math.pi) - math.pi).square()
            + 0.1 * speed.square()
            + 0.001 * u.square()
        )
        speed = (speed + (15 * theta.sin() + 3 * u) * 0.05).clamp(-8, 8)
        state = torch.stack([theta + speed * 0.05, speed])
        return state, -cost.float(), torch.zeros(self.n_envs, dtype=torch.bool, device=self.device)


class Planned(InTensors):
    "`toys.Counting` in tensors: it uses all of its memory again, also that of its infos, and changes the actions that it was given."

    def __init__(self, plans, env=Counting):
        super().__init__(factories(env, plans))
        self.memory = {}

    def reset(self, seed):
        return self.again("obs", super().reset(seed))

    def again(self, name, x):
        "`x` in the memory of the last time."
        if name not in self.memory:
            self.memory[name] = nested.map(torch.clone, x)
        nested.setitem(self.memory[name], ..., x)
        return self.memory[name]

    def step(self, act):
        obs, rew, term, trunc, final, _ = super().step(nested.map(torch.clone, act))
        nested.map(lambda x: x.fill_(1), act)

        # The infos of `Counting`
        place = final["place"] if isinstance(final, dict) else final
        tag, _, count, last = place.long().unbind(1)
        parts = {"half": count / 2, "at": torch.stack([tag, last], 1)}
        info = self.again("info", {"count": count, "parts": parts})

        flags = self.again("flags", (rew, term, trunc))
        return self.again("obs", obs), *flags, self.again("final", final), info

    def close(self):
        for env in self.envs:
            env.close()


PlannedNested = partial(Planned, env=Nested)


class AsVector(VectorEnv):
    "A `TensorEnv` as gymnasium's vector environment."

    def __init__(self, env):
        self.env = env
        self.num_envs = env.n_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = env.observation_space
        self.single_action_space = env.action_space
        self.observation_space = batch_space(env.observation_space, env.n_envs)
        self.action_space = batch_space(env.action_space, env.n_envs)

    def reset(self, *, seed=None, options=None):
        return self.plain(self.env.reset(seed)), {}

    def plain(self, x):
        return nested.map(lambda x: x.numpy().copy(), x)

    def step(self, actions):
        obs, rew, term, trunc, final, info = self.env.step(nested.map(torch.from_numpy, actions))
        obs, rew, term, trunc, final, info = map(self.plain, (obs, rew, term, trunc, final, info))
        over = term | trunc
        return (
            obs,
            rew,
            term,
            trunc,
            {**info, "final_obs": final, "_final_obs": over} if over.any() else info,
        )

    def close(self, **kwargs):
        pass
