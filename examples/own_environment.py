"""PPO learns on an environment of one's own, whose observations are a Dict."""

import gymnasium as gym
import numpy as np

from rollpipe import PPO, Critic, MLPPolicy, check_env, evaluate, on_policy


class Delivery(gym.Env):
    """A courier walks along a street of ten houses to the one that waits.

    Each step costs 0.1, and the delivery pays 1.
    """

    observation_space = gym.spaces.Dict(
        house=gym.spaces.Discrete(10), distance=gym.spaces.Box(-9.0, 9.0, (1,), np.float32)
    )
    action_space = gym.spaces.Discrete(3)  # left, deliver, right

    def observation(self):
        distance = np.array([self.goal - self.house], np.float32)
        return dict(house=self.house, distance=distance)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.house, self.goal = (int(x) for x in self.np_random.integers(10, size=2))
        return self.observation(), {}

    def step(self, action):
        self.house = int(np.clip(self.house + action - 1, 0, 9))
        is_delivered = action == 1 and self.house == self.goal
        reward = 1.0 if is_delivered else -0.1
        return (
            self.observation(),
            reward,
            is_delivered,
            False,
            dict(distance=self.goal - self.house),
        )


def delivery():
    "Environments end after 30 steps; this is no termination, and the value of the last state counts."
    return gym.wrappers.TimeLimit(Delivery(), 30)


def main():
    check_env(delivery)
    actor = MLPPolicy.for_env(delivery, hidden=(32,), seed=0)
    critic = Critic.for_env(delivery, hidden=(32,), seed=1)
    agent = PPO(actor, critic, lr=3e-3)
    pipe = on_policy(delivery, actor, critic, n_envs=8, n_steps=64, seed=0)
    for update, batch in zip(range(40), pipe):
        metrics = agent.update(batch)
        if update % 10 == 9:
            print(f"update {update + 1}: value loss {metrics['loss_value']:.3f}")
    result = evaluate(delivery, actor, n_episodes=50, seed=0)
    print(result)
    return result.mean


if __name__ == "__main__":
    main()
