"""One training run with the TRPO of Stable-Baselines3-contrib and its defaults; prints one line of JSON. It does not need rollpipe.

    python benchmarks/peer_contrib.py CartPole-v1 --seed 0 --steps 100000

It is run by `benchmarks/train.py --peer-python PATH`, where PATH is the interpreter of an environment with `sb3-contrib`.
"""

import argparse
import json
from importlib.metadata import version
from time import perf_counter

import torch


class Phases:
    "Seconds an algorithm spends in collecting, and in its policy and critic updates."

    def __init__(self, model):
        self.seconds = dict(collect=0.0, policy=0.0, critic=0.0)
        self.model = model
        self.collect = model.collect_rollouts
        self.train = model.train
        self.get = model.rollout_buffer.get
        model.collect_rollouts = self.on_collect
        model.train = self.on_train
        model.rollout_buffer.get = self.on_get

    def on_collect(self, *args, **kw):
        start = perf_counter()
        try:
            return self.collect(*args, **kw)
        finally:
            self.seconds["collect"] += perf_counter() - start

    def on_get(self, batch_size=None):
        "The policy gets the whole buffer at once; the update of the critic begins with the first minibatch."
        if batch_size is not None and self.critic_at is None:
            self.critic_at = perf_counter()
        return self.get(batch_size)

    def on_train(self):
        start = perf_counter()
        self.critic_at = None
        self.train()
        end = perf_counter()
        self.seconds["policy"] += (self.critic_at or end) - start
        self.seconds["critic"] += end - (self.critic_at or end)


def run(env, seed, steps, n_envs, n_steps, episodes):
    from sb3_contrib import TRPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    start = perf_counter()
    model = TRPO(
        "MlpPolicy", make_vec_env(env, n_envs, seed=seed), n_steps=n_steps, seed=seed, device="cpu"
    )
    phases = Phases(model)
    phases.seconds["set up"] = perf_counter() - start
    model.learn(steps)
    wall = perf_counter() - start
    score, _ = evaluate_policy(
        model, make_vec_env(env, 1, seed=seed + 1000), n_eval_episodes=episodes, deterministic=True
    )
    return dict(
        wall=wall,
        **phases.seconds,
        score=float(score),
        steps=model.num_timesteps,
        name=f"sb3-contrib {version('sb3-contrib')}, torch {version('torch')}",
    )


def main():
    args = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    args.add_argument("env")
    args.add_argument("--seed", type=int, default=0)
    args.add_argument("--steps", type=int, default=100_000)
    args.add_argument("--n-envs", type=int, default=8)
    args.add_argument("--n-steps", type=int, default=256)
    args.add_argument(
        "--episodes",
        type=int,
        default=20,
        help="number of episodes of the greedy evaluation afterwards",
    )
    args = args.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(run(**vars(args))))


if __name__ == "__main__":
    main()
