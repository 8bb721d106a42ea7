"""Learning from recorded steps: SAC records its training and its policies, and BC, IQL and TD3BC learn from these data alone.

    python benchmarks/offline.py [--env Pendulum-v1] [--teacher sac] [--steps 8000] [--medium STEPS] [--updates 5000] [--seeds 0-2]
        [--options JSON] [--learner-options JSON] [--learner-seeds 0-2]

The data are the steps of the training (`training`), and as many of the last policy (`last`) and of that after `--medium` steps (`medium`).
The table has mean returns: of the episodes in the data, of the teacher's policy that made them (for `training`, of the last one), and of
what has learned from the data. The presets of the algorithms are used, if the environment has some."""

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


def record(env, folder, steps, medium, seed, options, teacher="sac"):
    "Train the teacher and yield the name of a set of data in the folder, and the policy whose steps it has."
    agent, pipe = build(make_config(teacher, env, options, seed=seed, preset="auto"))
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


def learned(algorithm, env, data, updates, seed, options, mean):
    "The mean returns of the policy after each of these numbers of updates from the data, and the seconds that all updates took."
    options = dict(options, data=str(data))
    agent, pipe = build(make_config(algorithm, env, options, seed=seed, preset="auto"))
    returns = []
    seconds = 0.0
    start = time.perf_counter()
    for n, batch in enumerate(islice(pipe, max(updates)), 1):
        agent.update(batch)
        if n in updates:
            seconds += time.perf_counter() - start
            returns.append(mean(agent.actor))
            start = time.perf_counter()
    return returns, seconds


def main():
    args = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    args.add_argument("--env", default="Pendulum-v1")
    args.add_argument("--steps", type=int, default=8000, help="steps in each set of data")
    args.add_argument("--medium", type=int, help="steps after which a policy is recorded as well")
    args.add_argument("--teacher", default="sac", help="the algorithm that makes the data")
    args.add_argument(
        "--updates",
        type=int,
        nargs="+",
        default=[5000],
        help="updates of each learner, one row each",
    )
    args.add_argument("--seeds", default="0-2")
    args.add_argument("--options", type=json.loads, default={}, help="the teacher's, as JSON")
    args.add_argument("--learner-options", type=json.loads, default={}, help="as JSON")
    args.add_argument("--learner-seeds", help="by default that of the data")
    args.add_argument("--episodes", type=int, default=50)
    args.add_argument("--algorithms", nargs="+", default=ALGORITHMS)
    args = args.parse_args()
    torch.set_num_threads(1)
    print(
        f"rollpipe {rollpipe.__version__}, torch {torch.__version__}, gymnasium {gymnasium.__version__}, numpy {np.__version__}; "
        f"{args.env}, {args.steps} steps of data"
    )
    print(
        f"{'seed':>4} {'data':<10}{'in data':>9}{args.teacher:>9}{'seed':>6}{'updates':>9}"
        + "".join(f"{name:>9}" for name in args.algorithms)
        + "   seconds"
    )

    def mean(actor):
        return evaluate(args.env, actor, args.episodes, seed=1000).mean

    for seed in parse_seeds(args.seeds):
        with TemporaryDirectory() as folder:
            made = record(
                args.env, Path(folder), args.steps, args.medium, seed, args.options, args.teacher
            )
            policies = [(name, mean(actor)) for name, actor in made]
            for name, of_teacher in policies:
                data = Path(folder) / name
                for learner_seed in parse_seeds(args.learner_seeds or str(seed)):
                    curves = [
                        learned(
                            algorithm,
                            args.env,
                            data,
                            sorted(args.updates),
                            learner_seed,
                            args.learner_options,
                            mean,
                        )
                        for algorithm in args.algorithms
                    ]
                    for k, n in enumerate(sorted(args.updates)):
                        print(
                            f"{seed:>4} {name:<10}{return_in(data):>9.0f}{of_teacher:>9.0f}{learner_seed:>6}{n:>9}"
                            + "".join(f"{returns[k]:>9.0f}" for returns, _ in curves)
                            + "   "
                            + " ".join(f"{seconds:.0f}" for _, seconds in curves),
                            flush=True,
                        )


if __name__ == "__main__":
    main()
