"""Two groups of agents learn at once, each with its own PPO: one hides, the other seeks."""

import numpy as np
from gymnasium.spaces import Box, Discrete

from rollpipe import PPO, Critic, MLPPolicy, on_policy
from rollpipe.layers import ActorByGroup, CriticByGroup
from rollpipe.pipes.envs.agents import Agents


class HideAndSeek:
    "Two agents on a ring of 12 cells. The seeker is paid for being near, the hider for being far."

    possible_agents = ("hider", "seeker")

    def observation_space(self, agent):
        return Box(-6, 6, (1,))

    def action_space(self, agent):
        return Discrete(3)  # left, stay, right

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self.places = dict(zip(self.agents, self.rng.integers(12, size=2)))
        self.n = 0
        return self.observations(), {}

    def way(self):
        return (self.places["seeker"] - self.places["hider"] + 6) % 12 - 6

    def observations(self):
        return dict(hider=np.float32([self.way()]), seeker=np.float32([-self.way()]))

    def step(self, actions):
        for agent, action in actions.items():
            self.places[agent] = (self.places[agent] + action - 1) % 12
        self.n += 1
        far = abs(self.way()) / 6
        is_over = self.n == 30
        both = list(self.agents)
        if is_over:
            self.agents = []
        rewards = dict(hider=far, seeker=1 - far)
        terminated = dict.fromkeys(both, False)
        truncated = dict.fromkeys(both, is_over)
        return self.observations(), rewards, terminated, truncated, {}


def hide_and_seek():
    return Agents(HideAndSeek, copies=8, ids=True)


def main():
    groups = ["hider", "seeker"]  # the group of each agent
    actors = {name: MLPPolicy.for_env(hide_and_seek, hidden=(32,), seed=0) for name in groups}
    critics = {name: Critic.for_env(hide_and_seek, hidden=(32,), seed=1) for name in groups}
    agents = {name: PPO(actors[name], critics[name], seed=0) for name in groups}

    actor = ActorByGroup(actors, groups)
    critic = CriticByGroup(critics, groups)
    pipe = on_policy(hide_and_seek, actor, critic, n_envs=None, n_steps=60, seed=0)
    for update, batch in zip(range(20), pipe):
        means = {}
        for name, part in actor.parts(batch).items():
            agents[name].update(part)
            means[name] = float(part.state.rew[1:][part.valid].mean())
        if update % 5 == 4:
            print(f"update {update + 1}:", {name: round(mean, 2) for name, mean in means.items()})
    return sum(means.values())


if __name__ == "__main__":
    main()
