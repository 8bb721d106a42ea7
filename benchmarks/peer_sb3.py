"""One training with PPO or SAC of Stable-Baselines3, with the settings of `cleanrl_style.py`; prints one line of JSON.

    python benchmarks/peer_sb3.py ppo CartPole-v1 --seed 0 --steps 200000

It is run by `benchmarks/trainings.py --peer-python PATH` and does not need rollpipe.
"""

import argparse
import json
from importlib.metadata import version
from time import perf_counter, process_time

import cleanrl_style as style
import torch


def ppo_model(env, seed):
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    return PPO(
        "MlpPolicy",
        make_vec_env(env, style.N_ENVS, seed=seed),
        n_steps=style.N_STEPS,
        batch_size=style.N_ENVS * style.N_STEPS // style.MINIBATCHES,
        n_epochs=style.EPOCHS,
        gamma=style.GAMMA,
        gae_lambda=style.LAM,
        clip_range=style.CLIP,
        clip_range_vf=style.CLIP,
        ent_coef=style.C_ENTROPY,
        # its loss of values is the squared error, not half of it
        vf_coef=style.C_VALUE / 2,
        max_grad_norm=style.MAX_GRAD_NORM,
        learning_rate=lambda left: style.LR * left,
        policy_kwargs=dict(optimizer_kwargs=dict(eps=style.EPS)),
        seed=seed,
        device="cpu",
    )


def sac_model(env, seed):
    from stable_baselines3 import SAC
    from stable_baselines3.common.env_util import make_vec_env

    return SAC(
        "MlpPolicy",
        make_vec_env(env, 1, seed=seed),
        learning_rate=style.SAC_LR,
        batch_size=style.SAC_BATCH,
        learning_starts=style.SAC_WARMUP,
        gamma=style.GAMMA,
        tau=style.TAU,
        train_freq=1,
        gradient_steps=1,
        policy_kwargs=dict(net_arch=[style.SAC_HIDDEN, style.SAC_HIDDEN]),
        seed=seed,
        device="cpu",
    )


def run(algorithm, env, seed, steps):
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    start = perf_counter()
    cpu_start = process_time()
    model = dict(ppo=ppo_model, sac=sac_model)[algorithm](env, seed)
    model.learn(steps)
    wall = perf_counter() - start
    cpu = process_time() - cpu_start
    score, _ = evaluate_policy(
        model, make_vec_env(env, 1, seed=1000), n_eval_episodes=20, deterministic=True
    )
    name = f"stable-baselines3 {version('stable-baselines3')}, torch {version('torch')}"
    return dict(wall=wall, cpu=cpu, score=float(score), name=name)


def main():
    args = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    args.add_argument("algorithm", choices=["ppo", "sac"])
    args.add_argument("env")
    args.add_argument("--seed", type=int, default=0)
    args.add_argument("--steps", type=int, default=200_000)
    args = args.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(run(**vars(args))))


if __name__ == "__main__":
    main()
