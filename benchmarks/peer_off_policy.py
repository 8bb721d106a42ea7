"""One training run with SAC or TD3 of Stable-Baselines3; prints one line of JSON. It does not need rollpipe.

    python benchmarks/peer_off_policy.py sac Pendulum-v1 --seed 0 --steps 20000

It is run by `benchmarks/off_policy.py --peer-python PATH`, where PATH is the interpreter of an environment with `stable-baselines3`.
"""

import argparse
import json
import sys
from importlib.metadata import version
from time import perf_counter, process_time

import numpy as np
import torch


def run(algorithm, env, seed, steps, n_steps, hidden, lr, warmup, episodes, every):
    import stable_baselines3
    from stable_baselines3.common.callbacks import ConvertCallback, EveryNTimesteps
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.noise import NormalActionNoise

    score = lambda seed, n: float(
        evaluate_policy(
            model, make_vec_env(env, 1, seed=seed), n_eval_episodes=n, deterministic=True
        )[0]
    )
    curve = []
    spent = [0.0, 0.0]

    def evaluate(*_):
        begin = perf_counter()
        cpu_begin = process_time()
        curve.append((model.num_timesteps, score(seed + 1000 + model.num_timesteps, 10)))
        print(f"{algorithm} {env} seed {seed}: {curve[-1]}", file=sys.stderr, flush=True)
        spent[:] = spent[0] + perf_counter() - begin, spent[1] + process_time() - cpu_begin
        return True

    start = perf_counter()
    cpu = process_time()
    vec = make_vec_env(env, 1, seed=seed)
    more = {}
    if algorithm != "sac":
        more["action_noise"] = NormalActionNoise(
            np.zeros(vec.action_space.shape), 0.1 * np.ones(vec.action_space.shape)
        )
    model = getattr(stable_baselines3, algorithm.upper())(
        "MlpPolicy",
        vec,
        learning_rate=lr,
        batch_size=256,
        learning_starts=warmup,
        train_freq=n_steps,
        gradient_steps=n_steps,
        seed=seed,
        device="cpu",
        policy_kwargs=dict(net_arch=hidden),
        **more,
    )
    model.learn(steps, EveryNTimesteps(every, ConvertCallback(evaluate)) if every else None)
    wall = perf_counter() - start - spent[0]
    cpu = process_time() - cpu - spent[1]
    return dict(
        wall=wall,
        cpu=cpu,
        score=score(seed + 1000, episodes),
        curve=curve,
        name=f"stable-baselines3 {version('stable-baselines3')}, torch {version('torch')}",
    )


def add_options(args):
    "The options of one training, which both libraries have."
    args.add_argument("--seed", type=int, default=0, help="seed of one training")
    args.add_argument("--steps", type=int, default=20_000)
    args.add_argument(
        "--n-steps",
        type=int,
        default=8,
        help="steps of the environment between two series of as many updates",
    )
    args.add_argument("--hidden", type=int, nargs="+", default=[256, 256])
    args.add_argument("--lr", type=float, default=1e-3)
    args.add_argument(
        "--warmup",
        type=int,
        default=1000,
        help="first steps, with random actions and without updates",
    )
    args.add_argument(
        "--episodes",
        type=int,
        default=20,
        help="number of episodes of the greedy evaluation afterwards",
    )


def main():
    args = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    args.add_argument("algorithm", choices=["sac", "td3", "ddpg"])
    args.add_argument("env")
    add_options(args)
    args.add_argument(
        "--every",
        type=int,
        default=0,
        help="steps between evaluations of 10 episodes, whose time does not count; 0: none",
    )
    args = args.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(run(**vars(args))))


if __name__ == "__main__":
    main()
