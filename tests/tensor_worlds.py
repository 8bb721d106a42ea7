"""Environments whose batch is made of tensors: two of gymnasium's written for torch, one of which every number can be predicted."""

import math

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from toys import ENDS, Counting, Nested

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


class Planned(TensorEnv):
    "`toys.Counting` for tensors: it uses all of its memory again, also that of its infos, and changes the actions that it was given."

    observation_space, action_space = Counting.observation_space, Counting.action_space

    def __init__(self, plans):
        self.n_envs = len(plans)
        size = max(map(len, plans))
        whole = [(plan * size)[:size] for plan in plans]
        self.length = torch.tensor([[length for length, _ in plan] for plan in whole])
        self.kind = torch.tensor([[ENDS.index(end) for _, end in plan] for plan in whole])
        self.period, self.tag = (
            torch.tensor([len(plan) for plan in plans]),
            torch.arange(self.n_envs),
        )
        self.given = {}

    def reset(self, seed):
        self.seed = seed
        self.episode, self.count, self.last = torch.zeros(3, self.n_envs, dtype=torch.long)
        return self.again("obs", self.look())

    def again(self, name, x):
        "`x` in the memory of the last time."
        if name not in self.given:
            self.given[name] = nested.map(torch.clone, x)
        nested.setitem(self.given[name], ..., x)
        return self.given[name]

    def look(self):
        return torch.stack([self.tag, self.episode, self.count, self.last], 1).float()

    def number(self, act):
        return act

    def step(self, act):
        self.last = self.number(act).clone()
        self.count = self.count + 1
        nested.map(lambda x: x.fill_(1), act)
        which = (self.tag, self.episode % self.period)
        over = self.count >= self.length[which]
        kind = self.kind[which]
        rew = (100 * self.episode + self.count + self.last / 10).float()
        info = {
            "count": self.count,
            "parts": {"half": self.count / 2, "at": torch.stack([self.tag, self.last], 1)},
        }
        final = self.again("final", self.look())
        info = self.again("info", info)
        self.episode, self.count = self.episode + over, torch.where(over, 0, self.count)
        ends = over & (kind != ENDS.index("trunc")), over & (kind != ENDS.index("term"))
        return (self.again("obs", self.look()), *self.again("flags", (rew, *ends)), final, info)


class PlannedNested(Planned):
    "`toys.Nested` for tensors."

    observation_space, action_space = Nested.observation_space, Nested.action_space

    def look(self):
        pixels = self.count[:, None, None].expand(-1, 2, 2).to(torch.uint8)
        return {
            "place": super().look(),
            "exact": self.count.double() / 3 + self.last,
            "pair": [self.episode, {"pixels": pixels}],
        }

    def number(self, act):
        wheel, buttons = act["steer"]
        return act["gear"] + 10 * wheel.sum(1).long() + 1000 * buttons.sum(1).long()


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
