"""Wall time and return of SAC, TD3 and DDPG, and of Stable-Baselines3 with the same settings.

    python benchmarks/off_policy.py [--algorithms sac td3] [--envs Pendulum-v1] [--repeats 3] [--peer-python PATH]

One environment, 8 steps and then 8 updates with samples of 256 transitions, two hidden layers of 256, one thread; the first 1000
steps are random. 20 greedy episodes follow, which are not timed. Every run is its own process, and its time begins after the
imports. The two libraries alternate, and repeat number i has seed i. On a busy machine the processor time says more than the wall time.
PATH is the interpreter of an environment with `stable-baselines3` (`python -m venv DIR; DIR/bin/pip install stable-baselines3`).
"""

import json
import sys
from pathlib import Path
from time import perf_counter, process_time

import torch
from peer_off_policy import add_options
from report import header, options_of, runs_of, spread, table

from rollpipe.agents import evaluate
from rollpipe.pipes import replayed
from rollpipe.settings.algorithms import ALGORITHMS


def train(
    algorithm, env, seed, steps, n_steps, hidden, lr, warmup, episodes, engine="auto"
) -> dict:
    "Seconds of one training, and the mean return of the greedy policy."
    start = perf_counter()
    cpu = process_time()
    parts = ALGORITHMS[algorithm]
    hidden = tuple(hidden)
    actor = parts.policy.for_env(env, hidden=hidden, seed=seed)
    critic = parts.critic.for_env(
        env, hidden=hidden, n_critics=parts.defaults.get("n_critics", 2), seed=seed + 1000
    )
    agent = parts.learner(actor, critic, lr=lr, random_steps=warmup, seed=seed)
    sampling = 0.0
    pipe = replayed(
        env,
        actor,
        n_envs=1,
        n_steps=n_steps,
        samples_per_step=1.0,
        capacity=1_000_000,
        warmup=warmup,
        seed=seed,
        engine=engine,
    )
    updating = 0.0
    batches = iter(pipe)
    while agent.steps < steps:
        metrics = agent.update(next(batches))
        updating = updating + metrics["seconds_update"]
        sampling = sampling + metrics["seconds_sample"]
    wall = perf_counter() - start
    cpu = process_time() - cpu
    batches.close()
    score = evaluate(env, actor, episodes, seed=seed + 2000).mean
    return dict(
        wall=wall,
        cpu=cpu,
        score=score,
        updating=updating / wall,
        sampling=sampling / wall,
        name="rollpipe",
    )


def rows_of(algorithm, env, args):
    "Rows of the table for one algorithm in one environment."
    commands = [[sys.executable, __file__, "--one"]]
    if args.peer_python:
        commands.append([args.peer_python, Path(__file__).parent / "peer_off_policy.py"])
    options = [
        "--steps",
        args.steps,
        "--n-steps",
        args.n_steps,
        "--lr",
        args.lr,
        "--warmup",
        args.warmup,
        "--episodes",
        args.episodes,
    ]
    runs = runs_of(commands, [algorithm, env, *options, "--hidden", *args.hidden], args.repeats)
    for results in runs:
        ratios = [
            [peer[what] / ours[what] for ours, peer in zip(runs[0], results)]
            for what in ("wall", "cpu")
        ]
        yield [
            algorithm,
            env,
            results[0]["name"],
            *(spread([r[what] for r in results], "{:.1f}") for what in ("wall", "cpu")),
            *map(spread, ratios),
            " ".join(f"{r['score']:.0f}" for r in results),
        ]


def main():
    args = options_of(__doc__, algorithms=["sac", "td3"], envs=["Pendulum-v1"], repeats=3)
    add_options(args)
    args.add_argument(
        "--peer-python", metavar="PATH", help="interpreter of an environment with stable-baselines3"
    )
    args.add_argument(
        "--one",
        metavar=("ALGORITHM", "ENV"),
        nargs=2,
        help="run one training in this process and print it as JSON",
    )
    args = args.parse_args()
    torch.set_num_threads(1)
    if args.one:
        print(
            json.dumps(
                train(
                    *args.one,
                    args.seed,
                    args.steps,
                    args.n_steps,
                    args.hidden,
                    args.lr,
                    args.warmup,
                    args.episodes,
                )
            )
        )
        return
    print(header())
    print(
        f"{args.steps} steps, hidden layers {args.hidden}, learning rate {args.lr}, one thread; s, median (range) of {args.repeats} "
        "seeds; ratio: time to that of rollpipe with the same seed.\n"
    )
    rows = [
        row
        for algorithm in args.algorithms
        for env in args.envs
        for row in rows_of(algorithm, env, args)
    ]
    print(
        table(
            [
                "",
                "environment",
                "",
                "wall",
                "processor",
                "ratio of wall",
                "ratio of processor",
                f"greedy return of {args.episodes} episodes, by seed",
            ],
            rows,
        )
    )


if __name__ == "__main__":
    main()
