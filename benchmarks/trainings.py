"""Whole trainings of PPO and SAC: rollpipe, Stable-Baselines3 and a loop in CleanRL's style, with equal networks and settings.

    python benchmarks/trainings.py [--algorithms ppo sac] [--repeats 5] [--peer-python PATH]

PPO learns CartPole-v1 for 200 000 steps with the settings of CleanRL's `ppo.py`, and SAC learns Pendulum-v1 for 6000 steps with
networks 2x256 and one update after each step. `cleanrl_style.py` has both loops and says what the settings are. One thread each. Every
training is a process of its own, and its time begins after the imports. The sides alternate, and repeat number i has seed i. Afterwards
the greedy policy plays 20 episodes, which are not timed.

The critic of rollpipe's PPO also keeps the scale of its targets, and clips values in that unit. It bootstraps from true last
observations, as Stable-Baselines3 does; the loop does not. PATH is the interpreter of an environment with `stable-baselines3`
(`python -m venv DIR; DIR/bin/pip install stable-baselines3`).
"""

import json
import sys
from pathlib import Path
from time import perf_counter, process_time

import cleanrl_style as style
import torch
from report import header, options_of, runs_of, spread, table

from rollpipe.agents import PPO, SAC, evaluate
from rollpipe.layers import ActionCritic, Critic, MLPPolicy, SquashedPolicy
from rollpipe.pipes import on_policy, replayed

TASKS = dict(ppo=("CartPole-v1", 200_000), sac=("Pendulum-v1", 6000))
LOOP = "loop in CleanRL's style"


def ppo_by_hand(env, seed, steps):
    "Train with the loop; what it gives is asked for `score()`."
    loop = style.PPOLoop(env, seed)
    n_updates = steps // (style.N_ENVS * style.N_STEPS)
    for i in range(n_updates):
        for group in loop.optimizer.param_groups:
            group["lr"] = style.LR * (1 - i / n_updates)
        loop.update(loop.collect())
    return loop.score


def sac_by_hand(env, seed, steps):
    loop = style.SACLoop(env, seed)
    for i in range(steps):
        loop.step()
        if i >= style.SAC_WARMUP:
            loop.update()
    return loop.score


def ppo(env, seed, steps):
    "Train with the parts of the library."
    actor = MLPPolicy.for_env(env, normalize=False, seed=seed)
    critic = Critic.for_env(env, normalize=False, seed=seed)
    agent = PPO(
        actor,
        critic,
        epochs=style.EPOCHS,
        minibatch=style.N_ENVS * style.N_STEPS // style.MINIBATCHES,
        clip=style.CLIP,
        clip_value=style.CLIP,
        # half the squared error is what the weight of the loop means
        c_value=style.C_VALUE / 2,
        c_entropy=style.C_ENTROPY,
        lr=style.LR,
        decay_steps=steps,
        max_grad_norm=style.MAX_GRAD_NORM,
        normalize_adv="minibatch",
        seed=seed,
    )
    for group in agent.optimizer.param_groups:
        group["eps"] = style.EPS
    pipe = on_policy(
        env,
        actor,
        critic,
        n_envs=style.N_ENVS,
        n_steps=style.N_STEPS,
        gamma=style.GAMMA,
        lam=style.LAM,
        seed=seed,
    )
    return learn(agent, pipe, steps, env)


def sac(env, seed, steps):
    hidden = (style.SAC_HIDDEN, style.SAC_HIDDEN)
    actor = SquashedPolicy.for_env(env, hidden=hidden, seed=seed)
    critic = ActionCritic.for_env(env, hidden=hidden, n_critics=2, seed=seed + 1000)
    agent = SAC(actor, critic, lr=style.SAC_LR, random_steps=style.SAC_WARMUP, seed=seed)
    pipe = replayed(
        env,
        actor,
        n_envs=1,
        n_steps=1,
        n_batches=1,
        batch_size=style.SAC_BATCH,
        capacity=1_000_000,
        warmup=style.SAC_WARMUP,
        seed=seed,
    )
    return learn(agent, pipe, steps, env)


def learn(agent, pipe, steps, env):
    batches = iter(pipe)
    while agent.steps < steps:
        agent.update(next(batches))
    batches.close()
    return lambda: evaluate(env, agent.actor, 20, seed=1000).mean


SIDES = {"rollpipe": dict(ppo=ppo, sac=sac), LOOP: dict(ppo=ppo_by_hand, sac=sac_by_hand)}


def timed(side, algorithm, env, seed, steps) -> dict:
    "Seconds of the clock and of the processor, and the score afterwards."
    start = perf_counter()
    cpu_start = process_time()
    score = SIDES[side][algorithm](env, seed, steps)
    wall = perf_counter() - start
    cpu = process_time() - cpu_start
    return dict(wall=wall, cpu=cpu, score=float(score()), name=side)


def rows_of(algorithm, args):
    "Rows of the table for one algorithm."
    env, steps = TASKS[algorithm]
    steps = args.steps or steps
    commands = [[sys.executable, __file__, "--one", side] for side in SIDES]
    if args.peer_python:
        commands.append([args.peer_python, Path(__file__).parent / "peer_sb3.py"])
    runs = runs_of(commands, [algorithm, env, "--steps", steps], args.repeats)
    for results in runs:
        ratios = [
            [peer[what] / ours[what] for ours, peer in zip(runs[0], results)]
            for what in ("wall", "cpu")
        ]
        yield [
            f"{algorithm} on {env}, {steps} steps",
            results[0]["name"],
            *(spread([r[what] for r in results], "{:.1f}") for what in ("wall", "cpu")),
            *map(spread, ratios),
            " ".join(f"{r['score']:.0f}" for r in results),
        ]


def main():
    args = options_of(__doc__, algorithms=["ppo", "sac"], repeats=5, steps=0, seed=0)
    args.add_argument(
        "--peer-python", metavar="PATH", help="interpreter of an environment with stable-baselines3"
    )
    args.add_argument(
        "--one",
        metavar=("SIDE", "ALGORITHM", "ENV"),
        nargs=3,
        help="run one training in this process and print it as JSON",
    )
    args = args.parse_args()
    torch.set_num_threads(1)
    if args.one:
        print(json.dumps(timed(*args.one, args.seed, args.steps)))
        return
    print(header())
    print(
        f"One thread; s, median (range) of {args.repeats} seeds; ratio: time to that of rollpipe with the same seed.\n"
    )
    rows = [row for algorithm in args.algorithms for row in rows_of(algorithm, args)]
    print(
        table(
            [
                "training",
                "",
                "wall",
                "processor",
                "ratio of wall",
                "ratio of processor",
                "greedy return of 20 episodes, by seed",
            ],
            rows,
        )
    )


if __name__ == "__main__":
    main()
