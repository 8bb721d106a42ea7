"A memory that keeps each frame of stacked images once gives the samples of one that keeps the stacks."

from itertools import islice

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rollpipe.layers import QPolicy
from rollpipe.pipes import DataError, ReplayMemory, nested, replayed, rollouts


class Filmed(gym.Env):
    "The image shows the step number, and how many episodes there were; `x` is a number of the episode alone, the reward the step number."

    observation_space = gym.spaces.Dict(
        image=gym.spaces.Box(0, 255, (3, 4), np.uint8), x=gym.spaces.Box(0, 99, (1,))
    )
    action_space = gym.spaces.Discrete(2)
    n_episodes = 0
    length = 7

    def look(self):
        return dict(
            image=np.full((3, 4), 20 * (self.n_episodes % 10) + self.n, np.uint8), x=self.tag
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n, self.n_episodes, self.tag = (
            0,
            self.n_episodes + 1,
            self.np_random.random(1, np.float32),
        )
        return self.look(), {}

    def step(self, action):
        self.n += 1
        over = self.n == self.length
        return (
            self.look(),
            float(self.n),
            over and self.n_episodes % 2 == 0,
            over and self.n_episodes % 2 == 1,
            {},
        )


class Stacking(gym.ObservationWrapper):
    "Stacks the images beside other observations, as gymnasium does."

    def __init__(self, n):
        super().__init__(Filmed())
        image = gym.spaces.Box(0, 255, (n, 3, 4), np.uint8)
        self.n, self.frames, self.observation_space = (
            n,
            [],
            gym.spaces.Dict(image=image, x=self.env.observation_space["x"]),
        )

    def reset(self, **kwargs):
        self.frames = []
        return super().reset(**kwargs)

    def observation(self, obs):
        self.frames = (self.frames or [obs["image"]] * (self.n - 1))[1 - self.n :] + [obs["image"]]
        return dict(obs, image=np.stack(self.frames))


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "n_steps, length, prioritized, mode",
    [
        (4, 1, False, None),
        (5, 3, True, None),
        (16, 2, False, None),
        (4, 1, False, "NEXT_STEP"),
        (5, 3, True, "NEXT_STEP"),
    ],
)
def test_a_memory_of_frames_samples_what_a_memory_of_stacks_has(n_steps, length, prioritized, mode):
    """Each sampled segment is found among those of a memory that keeps the stacks whole, also where it crosses episodes.

    A vector that resets with the next step shows the last stack once more, before a step that is none. Its older frames are lost.
    """
    env = (
        (lambda: Stacking(3))
        if mode is None
        else lambda: SyncVectorEnv([lambda: Stacking(3)] * 2, autoreset_mode=AutoresetMode[mode])
    )
    actor = QPolicy.for_env(lambda: Stacking(3), hidden=(4,), seed=0)

    def pipe(frames):
        return replayed(
            env,
            actor,
            n_envs=2,
            n_steps=n_steps,
            lanes=2,
            capacity=80,
            batch_size=64,
            warmup=0,
            seed=0,
            length=length,
            prioritized=prioritized,
            frames=frames,
        )

    seen = {}
    n = 0
    saved = []
    for single, whole in islice(zip(pipe(3), pipe(1)), 14):

        def key(f, b):
            return tuple(
                x[:, b].numpy().tobytes()
                for x in (f.state.obs["x"], f.state.obs["image"][:, :, -1], f.state.rew)
            )

        def rest(f, b):
            ends = (f.final.b == b).nonzero()[:, 0]
            shown = torch.cat([f.valid[:, b], ~f.state.fin[-1:, b]]) if mode else slice(None)
            return (
                [x[shown, b] for x in nested.leaves(f.state.obs)]
                + [x[:, b] for x in (f.state.act, f.state.fin, f.term, f.valid)]
                + [x[ends] for x in (f.final.t, *nested.leaves(f.final.obs))]
            )

        for item in [*whole.samples] + [whole.memory.sample(200)]:
            for b in range(item.fragment.n_envs):
                seen.setdefault(key(item.fragment, b), []).append(rest(item.fragment, b))
        for item in single.samples:
            assert item.fragment.n_steps == length and item.fragment.state.obs["image"].shape == (
                length + 1,
                64,
                3,
                3,
                4,
            )
            if prioritized:
                single.memory.prioritize(item.index, torch.ones(64))
            for b in range(64):
                found = rest(item.fragment, b)
                like = seen.get(key(item.fragment, b), [])
                n += bool(like)
                assert not like or any(
                    all(torch.equal(x, y) for x, y in zip(found, other)) for other in like
                )
        saved = [memory.bytes_of_step for memory in (single.memory, whole.memory)]
    assert n > 500 and saved[1] - saved[0] == 2 * 12


def test_a_memory_of_frames_refuses_what_it_cannot_make_again():
    f = next(
        iter(
            rollouts(
                Filmed,
                QPolicy.for_env(Filmed, hidden=(4,)),
                n_envs=2,
                n_steps=4,
                terminal_obs=True,
                seed=0,
            )
        )
    )
    with pytest.raises(DataError, match="these are no stacks of frames"):
        ReplayMemory(50, frames=3).add(f)
    g = next(
        iter(
            rollouts(
                lambda: Stacking(3),
                QPolicy.for_env(lambda: Stacking(3), hidden=(4,)),
                n_envs=2,
                n_steps=4,
                seed=0,
            )
        )
    )
    g.state.obs["image"][2, 0, 0] += 1
    with pytest.raises(DataError, match=r"leaf obs\['image'\]: these are no stacks of frames"):
        ReplayMemory(50, frames=3).add(g)
    with pytest.raises(DataError, match="no segment fits in"):
        ReplayMemory(3, length=2, frames=3)
