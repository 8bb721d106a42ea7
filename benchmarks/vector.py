"""A vector environment through the pipeline, as a ratio to a hand-written loop of the same inference and recording in the same run.

    python benchmarks/vector.py [--n-envs 1024] [--n-steps 128] [--repeats 5] [--max-overhead 0.15]

Gymnasium's own vectorised CartPole (`vector_entry_point`, autoreset NEXT_STEP), MLPs 2x64 tanh, one thread. The loop records observation,
action, reward, both ends, `valid`, log-probability and, once a fragment, the critic's values; it checks nothing. There are two
comparisons: collecting alone, without a critic on either side, and the whole on-policy pipeline, whose GAE the loop does not have. The
pipeline runs tick by tick, because a pipe stands between stepper and collector, and as the recipe makes it. Runs are interleaved, and
times are processor time.
"""

import argparse
import gc
import sys
from statistics import median
from time import process_time

import gymnasium as gym
import numpy as np
import torch
from floor import Passing, mlp
from report import header, spread, table

from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes import EnvStepper, FragmentCollector, on_policy

ENV = "CartPole-v1"
ticked = Passing.inserter(after=EnvStepper)


class VectorFloor:
    "A loop that collects one fragment per call, in arrays; `critic` says whether it computes values."

    def __init__(self, n_envs, n_steps, critic):
        torch.manual_seed(0)
        self.vec = gym.make_vec(ENV, num_envs=n_envs, vectorization_mode="vector_entry_point")
        self.n_envs = n_envs
        self.n_steps = n_steps
        self.actor = mlp(4, 2)
        self.critic = mlp(4, 1) if critic else None
        self.obs = self.vec.reset(seed=0)[0]
        self.ended = np.zeros(n_envs, bool)

    @torch.no_grad()
    def collect(self):
        T, B = self.n_steps, self.n_envs
        obs_buf = torch.empty(T + 1, B, 4)
        act_buf = torch.empty(T, B, dtype=torch.long)
        rew_buf = torch.empty(T, B)
        logp_buf = torch.empty(T, B)
        term_buf, trunc_buf, valid_buf = torch.empty(3, T, B, dtype=torch.bool)
        for t in range(T):
            obs = torch.as_tensor(self.obs)
            logits = self.actor(obs).log_softmax(-1)
            act = torch.multinomial(logits.exp(), 1)
            logp_buf[t] = logits.gather(-1, act)[:, 0]
            obs_buf[t] = obs
            act_buf[t] = act = act[:, 0]
            valid_buf[t] = torch.from_numpy(~self.ended)
            self.obs, rew, term, trunc, _ = self.vec.step(act.numpy())
            self.ended = term | trunc
            rew_buf[t] = torch.from_numpy(rew)
            term_buf[t] = torch.from_numpy(term)
            trunc_buf[t] = torch.from_numpy(trunc)
        obs_buf[T] = torch.as_tensor(self.obs)
        values = self.critic(obs_buf)[..., 0] if self.critic else None
        return obs_buf, act_buf, rew_buf, term_buf, trunc_buf, valid_buf, logp_buf, values


def runs(n_envs, n_steps):
    "name -> functions that collect one fragment: by hand, through the pipeline tick by tick, and as it is"
    actor, critic = (c.for_env(ENV, normalize=False, seed=0) for c in (MLPPolicy, Critic))
    options = dict(vector="vector_entry_point")

    def collecting():
        return FragmentCollector(EnvStepper(ENV, actor, n_envs, seed=0, **options), n_steps)

    def whole():
        return on_policy(ENV, actor, critic, n_envs=n_envs, n_steps=n_steps, seed=0, **options)

    pipelines = {
        "collecting": (ticked(collecting()), collecting()),
        "on-policy, with GAE": (ticked(whole()), whole()),
    }
    return {
        name: (
            VectorFloor(n_envs, n_steps, name != "collecting").collect,
            *(iter(pipe).__next__ for pipe in both),
        )
        for name, both in pipelines.items()
    }


def seconds(collect):
    gc.collect()
    start = process_time()
    collect()
    return process_time() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n-envs", type=int, default=1024)
    parser.add_argument("--n-steps", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--max-overhead",
        type=float,
        default=None,
        help="fail if the pipeline adds more than this share",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    overheads = []
    for name, ways in runs(args.n_envs, args.n_steps).items():
        for collect in ways:
            collect()
        times = [[seconds(collect) for collect in ways] for _ in range(args.repeats)]
        loop, *pipelines = zip(*times)
        ratios = [[ours / theirs for ours, theirs in zip(column, loop)] for column in pipelines]
        overheads.append(median(ratios[-1]) - 1)
        rates = [[args.n_envs * args.n_steps / t for t in column] for column in (loop, *pipelines)]
        rows.append([name, *(spread(r, "{:,.0f}") for r in rates), *map(spread, ratios)])
    print(header(("torch", "gymnasium", "numpy", "rollpipe")))
    print(
        f"{ENV}, B = {args.n_envs}, T = {args.n_steps}; rows per second, median of {args.repeats} (range)\n"
    )
    ways = "tick by tick", "pipeline"
    print(
        table(
            [
                "",
                "hand-written loop",
                *ways,
                *(f"time of {way} / time of the loop" for way in ways),
            ],
            rows,
        )
    )
    if args.max_overhead is not None and max(overheads) > args.max_overhead:
        sys.exit(1)


if __name__ == "__main__":
    main()
