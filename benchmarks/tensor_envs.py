"""Environments made of tensors through the pipeline, as a ratio to a hand-written loop of the same work in the same run.

    python benchmarks/tensor_envs.py [--n-envs 4096] [--n-steps 128] [--repeats 7] [--device cpu] [--max-overhead 0.05]

CartPole and Pendulum in pure torch (the tests' own), MLPs 2x64 tanh, one thread. The loop samples and records observation, action, reward,
both ends, the true last observations of truncated episodes and, once a fragment, log-probabilities; it checks nothing. There are two
comparisons: collecting alone, and with a critic and GAE on both sides. Runs are interleaved. Times are processor time, on an accelerator
wall time.
"""

import argparse
import gc
import sys
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import torch
from floor import HALF_LOG_2PI, mlp
from report import header, spread, table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from tensor_worlds import CartPole, Pendulum

from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes import AdvantageBuffer
from rollpipe.pipes.tensors.collector import TensorCollector

ENVS = {"CartPole": CartPole, "Pendulum": Pendulum}


class TensorFloor:
    "A loop that collects one fragment per call, with advantages if there is a critic."

    def __init__(self, make, n_envs, n_steps, device, critic):
        torch.manual_seed(0)
        self.env = make(n_envs, device=device)
        self.n_steps = n_steps
        self.device = device
        self.discrete = hasattr(self.env.action_space, "n")
        self.n_obs = self.env.observation_space.shape[0]
        self.actor = mlp(self.n_obs, 2 if self.discrete else 1).to(device)
        self.log_std = torch.zeros(1, device=device)
        self.center = torch.zeros(1, device=device)
        self.half_range = torch.full((1,), 2.0, device=device)
        self.critic = mlp(self.n_obs, 1).to(device) if critic else None
        self.obs = self.env.reset(0).clone()

    def act(self, out):
        if self.discrete:
            return (out + torch.empty_like(out).exponential_().log_().neg_()).argmax(-1)
        return torch.addcmul(out, self.log_std.exp(), torch.randn_like(out))

    def logp(self, out, act):
        if self.discrete:
            return out.log_softmax(-1).gather(-1, act[..., None])[..., 0]
        return (-0.5 * ((act - out) / self.log_std.exp()) ** 2 - self.log_std - HALF_LOG_2PI).sum(
            -1
        )

    @torch.no_grad()
    def collect(self):
        T = self.n_steps
        B = self.env.n_envs
        options = dict(device=self.device)
        obs_buf = torch.empty(T + 1, B, self.n_obs, **options)
        out_buf = torch.empty(T, B, 2 if self.discrete else 1, **options)
        act_buf = (
            torch.empty(T, B, dtype=torch.long, **options)
            if self.discrete
            else torch.empty(T, B, 1, **options)
        )
        rew_buf = torch.empty(T, B, **options)
        (term_buf, trunc_buf) = torch.empty(2, T, B, dtype=torch.bool, **options)
        obs_buf[0] = self.obs
        last = []
        for t in range(T):
            out = self.actor(obs_buf[t])
            if not self.discrete:
                out = torch.addcmul(self.center, self.half_range, out)  # in the units of the action
            out_buf[t] = out
            act_buf[t] = act = self.act(out)
            obs_buf[t + 1], rew_buf[t], term_buf[t], trunc_buf[t], final, _ = self.env.step(act)
            if trunc_buf[t].any():
                last.append((t, final.clone()))
        self.obs, logp = obs_buf[T].clone(), self.logp(out_buf, act_buf)
        found = [(t, (at := (trunc_buf[t] & ~term_buf[t]).nonzero()[:, 0]), x[at]) for t, x in last]
        if self.critic is None:
            return obs_buf, act_buf, rew_buf, term_buf, trunc_buf, logp, found
        v = self.critic(obs_buf)[..., 0]
        v_next = None
        v_next = v[1:].clone()
        for t, at, x in found:
            v_next[t, at] = self.critic(x)[..., 0]
        adv = torch.empty(T, B, **options)
        total = 0
        over = term_buf | trunc_buf
        go_on = ~term_buf
        for t in reversed(range(T)):
            total = rew_buf[t] + 0.99 * v_next[t] * go_on[t] - v[t] + 0.99 * 0.95 * total * ~over[t]
            adv[t] = total
        return obs_buf, act_buf, rew_buf, term_buf, trunc_buf, logp, found, adv, adv + v[:-1]


def runs(make, n_envs, n_steps, device):
    "name -> (function that collects one fragment by hand, the same through the pipeline)"
    actor, critic = (
        c.for_env(make(1), normalize=False, seed=0).to(device) for c in (MLPPolicy, Critic)
    )

    def source():
        return TensorCollector(lambda: make(n_envs, device=device), actor, n_steps, seed=0)

    alone = iter(source())
    whole = iter(AdvantageBuffer(source(), critic))
    return {
        "collecting": (
            TensorFloor(make, n_envs, n_steps, device, False).collect,
            lambda: next(alone),
        ),
        "with critic and GAE": (
            TensorFloor(make, n_envs, n_steps, device, True).collect,
            lambda: next(whole),
        ),
    }


def seconds(collect, device):
    gc.collect()
    clock = process_time if device == "cpu" else perf_counter
    start = clock()
    collect()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n-envs", type=int, default=4096)
    parser.add_argument("--n-steps", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--max-overhead",
        type=float,
        default=None,
        help="fail if the pipeline adds more than this share",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    overhead = {}
    for env, make in ENVS.items():
        for name, pair in runs(make, args.n_envs, args.n_steps, args.device).items():
            for collect in pair * 2:
                seconds(collect, args.device)
            times = [
                [seconds(collect, args.device) for collect in pair] for _ in range(args.repeats)
            ]
            ratios = [ours / theirs for theirs, ours in times]
            overhead[env, name] = median(ratios) - 1
            rates = [[args.n_envs * args.n_steps / t for t in column] for column in zip(*times)]
            rows.append([env, name, *(spread(r, "{:,.0f}") for r in rates), spread(ratios)])
    print(header(("torch", "gymnasium", "numpy", "rollpipe")))
    print(
        f"B = {args.n_envs}, T = {args.n_steps}, {args.device}; steps per second, median of {args.repeats} (range)\n"
    )
    print(
        table(
            ["", "", "hand-written loop", "pipeline", "time of the pipeline / time of the loop"],
            rows,
        )
    )
    if args.max_overhead is not None and max(overhead.values()) > args.max_overhead:
        sys.exit(1)


if __name__ == "__main__":
    main()
