"""The steps of one policy are recorded, and another one learns from them without an environment."""

import shutil
from itertools import islice

from rollpipe import TRPO, Critic, MLPPolicy, evaluate, on_policy
from rollpipe.agents.offline import BC
from rollpipe.pipes import Recorder, rollouts
from rollpipe.pipes.recording.data_sampler import from_data


def main():
    # Somebody who can do it
    teacher = MLPPolicy.for_env("CartPole-v1", seed=0)
    critic = Critic.for_env("CartPole-v1", seed=1)
    agent = TRPO(teacher, critic)
    for batch in islice(on_policy("CartPole-v1", teacher, critic, n_steps=128, seed=0), 60):
        agent.update(batch)

    # What they do is recorded
    shutil.rmtree("data", ignore_errors=True)
    live = rollouts("CartPole-v1", teacher, n_envs=8, n_steps=200, seed=1)
    for _ in islice(Recorder(live, "data"), 5):
        pass  # 8 000 steps

    # Somebody who has only the recording
    student = MLPPolicy.for_env("CartPole-v1", seed=2)
    agent = BC(student, lr=3e-3, seed=0)
    for batch in islice(from_data("CartPole-v1", data="data", seed=0), 500):
        agent.update(batch)
    result = evaluate("CartPole-v1", student, n_episodes=20, seed=0)
    print(result)
    return result.mean


if __name__ == "__main__":
    main()
