"""PPO learns from images: a paddle must be under a falling dot."""

import gymnasium as gym
import numpy as np

from rollpipe import PPO, Critic, MLPPolicy, evaluate, on_policy


class Catch(gym.Env):
    "The dot falls one row a step, and the paddle on the lowest row must be under it at the end."

    observation_space = gym.spaces.Box(0, 255, (10, 10), np.uint8)
    action_space = gym.spaces.Discrete(3)  # left, stay, right

    def image(self):
        image = np.zeros((10, 10), np.uint8)
        image[self.row, self.column] = 255
        image[9, self.paddle] = 255
        return image

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.row, self.paddle = 0, 5
        self.column = int(self.np_random.integers(10))
        return self.image(), {}

    def step(self, action):
        self.paddle = int(np.clip(self.paddle + action - 1, 0, 9))
        self.row += 1
        is_over = self.row == 9
        reward = float(is_over and self.paddle == self.column)
        return self.image(), reward, is_over, False, {}


def main():
    convolutions = dict(images="conv", n_out=64)
    actor = MLPPolicy.for_env(Catch, encoder=convolutions, hidden=(), seed=0)
    critic = Critic.for_env(Catch, encoder=convolutions, hidden=(), seed=1)
    agent = PPO(actor, critic, epochs=4, lr=1e-3)
    pipe = on_policy(Catch, actor, critic, n_envs=8, n_steps=90, seed=0)
    for _, batch in zip(range(40), pipe):
        agent.update(batch)
    result = evaluate(Catch, actor, n_episodes=100, seed=0)
    print(result)  # a paddle that never moves catches one dot in ten
    return result.mean


if __name__ == "__main__":
    main()
