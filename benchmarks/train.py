"""Wall time of whole trainings with TRPO by phase, and the same with Stable-Baselines3-contrib.

    python benchmarks/train.py [--envs CartPole-v1 Pendulum-v1] [--engines torch onnxruntime] [--repeats 5] [--peer-python PATH]

100 000 steps, 8 environments, 256 steps each per update, one thread, and otherwise the defaults of each side. 20 greedy episodes follow,
which are not timed. The recipes act with the engine torch, and the command line with ONNX Runtime if it is installed. Every run is its
own process, and its time begins after the imports. What torch imports late, with the first optimiser, counts as "set up" on both sides.
The two libraries alternate, and repeat number i has seed i.
PATH is the interpreter of an environment with `sb3-contrib`
(`python -m venv DIR; DIR/bin/pip install sb3-contrib`).
"""

import json
import sys
from pathlib import Path
from time import perf_counter

import torch
from report import header, options_of, runs_of, spread, table

from rollpipe.agents import TRPO, evaluate
from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes import on_policy

PHASES = ("set up", "collect", "policy", "critic")


def train(env, seed, steps, n_envs, n_steps, episodes, engine="torch") -> dict:
    "Seconds by phase of one training, and the mean return of the greedy policy."
    start = perf_counter()
    done = 0
    seconds = dict.fromkeys(PHASES, 0.0)
    actor = MLPPolicy.for_env(env, seed=seed)
    critic = Critic.for_env(env, seed=seed + 1000)
    agent = TRPO(actor, critic, seed=seed)
    batches = iter(
        on_policy(env, actor, critic, n_envs=n_envs, n_steps=n_steps, seed=seed, engine=engine)
    )
    seconds["set up"] = perf_counter() - start
    while done < steps:
        waiting = perf_counter()
        batch = next(batches)
        seconds["collect"] += perf_counter() - waiting
        metrics = agent.update(batch)
        done += int(batch.valid.sum())
        for phase in ("policy", "critic"):
            seconds[phase] += metrics[f"seconds_{phase}"]
    wall = perf_counter() - start
    batches.close()
    return dict(
        wall=wall,
        **seconds,
        score=evaluate(env, actor, episodes, seed=seed + 2000).mean,
        steps=done,
        name=f"rollpipe, {engine}",
    )


def rows_of(env, args):
    "Rows of the table for one environment."
    commands = [[sys.executable, __file__, "--engines", engine, "--one"] for engine in args.engines]
    if args.peer_python:
        commands.append([args.peer_python, Path(__file__).parent / "peer_contrib.py"])
    options = [
        "--steps",
        args.steps,
        "--n-envs",
        args.n_envs,
        "--n-steps",
        args.n_steps,
        "--episodes",
        args.episodes,
    ]
    runs = runs_of(commands, [env, *options], args.repeats)
    for results in runs:
        faster = [peer["wall"] / ours["wall"] for ours, peer in zip(runs[0], results)]
        yield [
            env,
            results[0]["name"],
            *(spread([r[phase] for r in results], "{:.1f}") for phase in (*PHASES, "wall")),
            spread(faster),
            " ".join(f"{r['score']:.0f}" for r in results),
        ]


def main():
    args = options_of(
        __doc__,
        envs=["CartPole-v1", "Pendulum-v1"],
        repeats=5,
        steps=100_000,
        n_envs=8,
        n_steps=256,
    )
    args.add_argument(
        "--engines",
        nargs="+",
        default=["torch"],
        help="what acts while collecting: torch, onnxruntime",
    )
    args.add_argument(
        "--episodes",
        type=int,
        default=20,
        help="number of episodes of the greedy evaluation afterwards",
    )
    args.add_argument(
        "--peer-python", metavar="PATH", help="interpreter of an environment with sb3-contrib"
    )
    args.add_argument(
        "--one", metavar="ENV", help="run one training in this process and print it as JSON"
    )
    args.add_argument("--seed", type=int, default=0, help="seed of that training")
    args = args.parse_args()
    torch.set_num_threads(1)
    if args.one:
        print(
            json.dumps(
                train(
                    args.one,
                    args.seed,
                    args.steps,
                    args.n_envs,
                    args.n_steps,
                    args.episodes,
                    args.engines[0],
                )
            )
        )
        return
    print(header())
    print(
        f"{args.steps} steps, {args.n_envs} environments x {args.n_steps} steps, one thread; s, median (range) of {args.repeats} seeds; "
        "ratio: wall time to that of the first line with the same seed.\n"
    )
    rows = [row for env in args.envs for row in rows_of(env, args)]
    print(
        table(
            [
                "environment",
                "",
                *PHASES,
                "wall",
                "ratio",
                f"greedy return of {args.episodes} episodes, by seed",
            ],
            rows,
        )
    )


if __name__ == "__main__":
    main()
