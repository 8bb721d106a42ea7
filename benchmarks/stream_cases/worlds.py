"Environments, actors and small networks of the cases. Worker processes import this module by its name."

from functools import partial

import gymnasium as gym
import numpy as np
import optree
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rollpipe.layers import Actor, Critic, MLPPolicy


class Walk(gym.Env):
    "A random walk that actions push. Its episodes take 2 to 11 steps; half of them terminate, the others are truncated."

    observation_space = Box(-np.inf, np.inf, (3,))
    action_space = Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.normal(size=3)
        self.count = 0
        self.length, self.is_cut_off = (
            int(self.np_random.integers(2, 12)),
            bool(self.np_random.random() < 0.5),
        )
        return self.look(), self.info()

    def step(self, action):
        push = sum(float(np.sum(x)) for x in optree.tree_leaves(action))
        self.x = 0.9 * self.x + 0.1 * np.tanh(push) + 0.3 * self.np_random.normal(size=3)
        self.count = self.count + 1
        over = self.count == self.length
        return (
            self.look(),
            float(self.x.sum()),
            over and not self.is_cut_off,
            over and self.is_cut_off,
            self.info(),
        )

    def look(self):
        return self.x.astype(np.float32)

    def info(self):
        return {
            "count": self.count,
            "parts": {"half": self.count / 2, "at": self.x.copy()},
            "name": f"step {self.count}",
        }


class Push(Walk):
    action_space = Box(-1, 1, (2,))


class ManyNumbers(Walk):
    action_space = MultiDiscrete([3, 4])


class ManyBits(Walk):
    action_space = MultiBinary(3)


class FromFive(Walk):
    action_space = Discrete(3, start=5)


class Hybrid(Walk):
    "Containers of several dtypes are seen; discrete and continuous actions are taken together."

    observation_space = Dict(
        place=Box(-np.inf, np.inf, (3,)),
        exact=Box(-np.inf, np.inf, (), np.float64),
        pair=Tuple((Discrete(12), Dict(pixels=Box(0, 255, (2, 2), np.uint8)))),
    )
    action_space = Dict(gear=Discrete(3, start=1), steer=Tuple((Box(-1, 1, (2,)), MultiBinary(2))))

    def look(self):
        pixels = np.full((2, 2), 20 * self.count, np.uint8)
        return {
            "place": self.x.astype(np.float32),
            "exact": np.asarray(self.x.sum()),
            "pair": (np.int64(self.count), {"pixels": pixels}),
        }


class Images(Walk):
    "One bright pixel wanders over 84 x 84 x 2 bytes: a fragment of them is large, which matters to the transport between processes."

    observation_space = Box(0, 255, (84, 84, 2), np.uint8)

    def look(self):
        image = np.zeros((84, 84, 2), np.uint8)
        image[7 * self.count, int(40 + 5 * self.x[0]) % 84] = 255
        return image


class Frames(Walk):
    "Small images of one channel, to be stacked."

    observation_space = Box(0, 255, (8, 8), np.uint8)

    def look(self):
        return np.full((8, 8), 10 * self.count, np.uint8)


class Broken(Push):
    "Gives something wrong at its 5th step: the observation, the reward, an exception."

    def __init__(self, obs=None, reward=None, error=None):
        self.wrong = obs
        self.reward = reward
        self.error = error
        self.steps = 0

    def step(self, action):
        obs, reward, *rest = super().step(action)
        self.steps += 1
        if self.steps != 5:
            return obs, reward, *rest
        if self.error:
            raise ValueError(self.error)
        return (
            obs if self.wrong is None else self.wrong,
            reward if self.reward is None else self.reward,
            *rest,
        )


def vector(mode, env=Walk, n=3):
    "A factory of a vector environment with the autoreset mode of that name."
    return partial(SyncVectorEnv, [env] * n, autoreset_mode=AutoresetMode[mode])


class Glance(torch.nn.Module):
    "Every twelfth pixel `[..., 84, 84, 2]` as features `[..., 98]`."

    n_out, is_unit = 98, True

    def forward(self, obs):
        return obs[..., ::12, ::12, :].flatten(-3).float() / 255


def glance(space):
    return Glance()


class Dice(Actor):
    "No `draw_noise`: draws its actions for `Push` from torch's global generator."

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        drawn = torch.randn(*fin.shape, 2)
        return drawn, (), {"drawn": drawn.clone(), "seen": rew + stepno}


class Judging(Actor):
    "Actions for `Walk` that follow from what is seen, and a value of it: no critic is needed."

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        return (obs[..., 0] > 0).long() + (stepno > 2), (), {"value": obs.sum(-1)}


def spaces(env):
    return env if isinstance(env, str) else (env.observation_space, env.action_space)


def policy(env, cls=MLPPolicy, seed=0, **kwargs):
    "A small policy for an environment."
    return cls.for_env(spaces(env), seed=seed, **{"hidden": (16,), **kwargs})


def critic(env, cls=Critic, **kwargs):
    return policy(env, cls, seed=1, **kwargs)
