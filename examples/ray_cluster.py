"""The lanes of a pipeline run in a Ray cluster, and the numbers are those of one process."""

import torch

from rollpipe import PPO, Critic, DataLoader2, MLPPolicy, RayReading, on_policy


def trained(reading_service=None):
    "The weights after five updates, collected in this process or by a reading service."
    actor = MLPPolicy.for_env("Pendulum-v1", seed=0)
    critic = Critic.for_env("Pendulum-v1", seed=1)
    agent = PPO(actor, critic, seed=0)
    pipe = on_policy("Pendulum-v1", actor, critic, n_envs=4, n_steps=64, lanes=2, seed=0)
    with DataLoader2(pipe, reading_service=reading_service) as loader:
        for _, batch in zip(range(5), loader):
            agent.update(batch)
    return torch.cat([weights.detach().flatten() for weights in actor.parameters()])


def main():
    # Without an address, Ray is started on this machine, for this process alone.
    here = trained()
    there = trained(RayReading(num_workers=2))
    print("the same weights, bit for bit:", torch.equal(here, there))
    return torch.equal(here, there)


if __name__ == "__main__":
    main()
