"""Learning from recorded steps: SAC records its training and its policies, and BC, IQL and TD3BC learn from these data alone.

    python benchmarks/offline.py [--env Pendulum-v1] [--steps 8000] [--medium STEPS] [--updates 5000] [--seeds 0-2] [--options JSON]

The data are the steps of the training (`training`), and as many of the last policy (`last`) and of that after `--medium` steps (`medium`).
The table has mean returns: of the episodes in the data, of the policy of SAC that made them (for `training`, of the last one), and of what
has learned from the data. The presets of the algorithms are used, if the environment has some."""

import argparse
import json
import time
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import gymnasium
import numpy as np
import torch

import rollpipe
from rollpipe.agents import EpisodeReturns, evaluate
from rollpipe.pipes import Lanes, Recorder, Replayer, rollouts
from rollpipe.settings.config import build, make_config
from rollpipe.settings.options import parse_seeds

ALGORITHMS = "bc", "iql", "td3bc"


def record(env, folder, steps, medium, seed, options):
    "Train SAC and yield the name of a set of data in the folder, and the policy whose steps it has."
    agent, pipe = build(make_config("sac", env, options, seed=seed, preset="auto"))
    pipe = Recorder.inserter(after=Lanes, path=folder / "training")(pipe)
    wanted = {"medium": medium, "last": steps} if medium else {"last": steps}
    for batch in pipe:
        agent.update(batch)
        for name in [name for name, at in wanted.items() if agent.steps >= at]:
            del wanted[name]
            n = 200
            data = Recorder(
                rollouts(
                    env, agent.actor, n_envs=4, n_steps=n, seed=seed + 1000, terminal_obs=True
                ),
                folder / name,
            )
            for _ in islice(data, steps // (4 * n)):
                pass
            yield name, agent.actor
        if not wanted:
            break
    yield "training", agent.actor


def return_in(data):
    "The mean return of the episodes in the data."
    seen = EpisodeReturns()
    for item in Replayer(data):
        seen.add(item)
    return seen.pop()[0].mean()


def learned(algorithm, env, data, updates, seed):
    "The policy after so many updates from the data, and the seconds that they took."
    agent, pipe = build(make_config(algorithm, env, dict(data=str(data)), seed=seed, preset="auto"))
    start = time.perf_counter()
    for batch in islice(pipe, updates):
        agent.update(batch)
    return agent.actor, time.perf_counter() - start


def main():
    args = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    args.add_argument("--env", default="Pendulum-v1")
    args.add_argument("--steps", type=int, default=8000, help="steps in each set of data")
    args.add_argument("--medium", type=int, help="steps after which a policy is recorded as well")
    args.add_argument("--updates", type=int, default=5000, help="updates of each learner")
    args.add_argument("--seeds", default="0-2")
    args.add_argument("--options", type=json.loads, default={}, help="options of SAC, as JSON")
    args.add_argument("--episodes", type=int, default=50)
    args.add_argument("--algorithms", nargs="+", default=ALGORITHMS)
    args = args.parse_args()
    torch.set_num_threads(1)
    print(
        f"rollpipe {rollpipe.__version__}, torch {torch.__version__}, gymnasium {gymnasium.__version__}, numpy {np.__version__}; "
        f"{args.env}, {args.steps} steps of data, {args.updates} updates"
    )
    print(
        f"{'seed':>4} {'data':<10}{'in data':>9}{'SAC':>9}"
        + "".join(f"{name:>9}" for name in args.algorithms)
        + "   seconds"
    )
    for seed in parse_seeds(args.seeds):
        with TemporaryDirectory() as folder:

            def mean(actor):
                return evaluate(args.env, actor, args.episodes, seed=1000).mean

            policies = [
                (name, mean(actor))
                for name, actor in record(
                    args.env, Path(folder), args.steps, args.medium, seed, args.options
                )
            ]
            for data, sac in policies:
                found = [
                    learned(name, args.env, Path(folder) / data, args.updates, seed)
                    for name in args.algorithms
                ]
                returns = [
                    return_in(Path(folder) / data),
                    sac,
                    *(mean(actor) for actor, _ in found),
                ]
                print(
                    f"{seed:>4} {data:<10}"
                    + "".join(f"{x:>9.0f}" for x in returns)
                    + "   "
                    + " ".join(f"{seconds:.0f}" for _, seconds in found),
                    flush=True,
                )


if __name__ == "__main__":
    main()
