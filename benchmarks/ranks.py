"""Milliseconds of one update on one process and on two ranks, each with one thread; what they send; and what one reduction costs.

    python benchmarks/ranks.py [--cases trpo:25000x256 trpo:2500x64 ppo:2048x64] [--ranks 2] [--repeats 5] [--updates 3] [--gloo]

A case is the learner, the number of rows in the joined batch, and the width of two tanh layers; observation 17, Gaussian action 6. The
batches are random numbers, and nothing is collected. Each rank has its share of the columns, and learns with `ranks.distributed`. The runs
alternate: one process, then the ranks. The ranks sum through shared memory, or all by gloo over the loopback interface.
"""

import math
import os
import statistics
import tempfile
from contextlib import nullcontext
from time import perf_counter

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gymnasium.spaces import Box
from report import header, options_of, spread, table

from rollpipe import ranks
from rollpipe.agents import PPO, TRPO
from rollpipe.layers import Critic, GaussianPolicy
from rollpipe.pipes.data.fragment import Fragment

N_OBS = 17
N_ACT = 6
T = 50
LEARNERS = dict(
    trpo=lambda *nets: TRPO(*nets), ppo=lambda *nets: PPO(*nets, epochs=10, minibatch=256)
)


def learner(kind, width):
    spaces = Box(-1, 1, (N_OBS,)), Box(-1, 1, (N_ACT,))
    networks = dict(hidden=(width, width), seed=0)
    return LEARNERS[kind](
        GaussianPolicy.for_env(spaces, **networks), Critic.for_env(spaces, **networks)
    )


def batch_of(agent, n_envs, seed):
    "Random transitions [T, n_envs], with what the actor reports for them."
    g = torch.Generator().manual_seed(seed)
    obs = torch.randn(T + 1, n_envs, N_OBS, generator=g)
    adv = torch.randn(T, n_envs, generator=g)
    with torch.no_grad():
        dist_params = agent.actor.replay(
            plain := Fragment.from_steps(
                obs,
                torch.randn(T, n_envs, N_ACT, generator=g).clamp(-1, 1),
                torch.zeros(T, n_envs),
                actor=dict(logp=torch.zeros(T + 1, n_envs)),
            )
        )
    logp = torch.cat([dist_params["logp"].view(T, n_envs), torch.zeros(1, n_envs)])
    return plain._replace(
        actor=dict(plain.actor, logp=logp), adv=adv, ret=torch.randn(T, n_envs, generator=g)
    )


class Counted:
    "Counts the calls in which all ranks take part, and the bytes that this rank gives to them."

    def __init__(self, call):
        self.call = call
        self.calls = 0
        self.bytes = 0

    def __call__(self, collective, *args):
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        self.calls, self.bytes = self.calls + 1, self.bytes + sum(x.nbytes for x in tensors)
        self.call(collective, *args)


def timed(agent, batch, n):
    "Median milliseconds of `n` updates and of their policy's part, after one that is not counted; the part is nan for other learners."
    agent.update(batch)
    found = []
    for _ in range(n):
        start = perf_counter()
        metrics = agent.update(batch)
        found.append((perf_counter() - start, metrics.get("seconds_policy", math.nan)))
    return [1000 * statistics.median(times) for times in zip(*found)]


def one_rank(rank, folder, n_ranks, kind, n_rows, width, n_updates, gloo):
    "What rank 0 tells: times, calls and bytes of an update, and the milliseconds of reductions."
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if n_ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n_ranks
        )
    agent = learner(kind, width)
    batch = batch_of(agent, n_rows // T // n_ranks, rank)
    if gloo:
        ranks.collectives.shared_sums = lambda *_: None
    counted = ranks.collectives._call = Counted(ranks.collectives._call)
    with ranks.distributed(agent) if n_ranks > 1 else nullcontext():
        times = timed(agent, batch, n_updates)
        calls, n_bytes = (x / (n_updates + 1) for x in (counted.calls, counted.bytes))
        sizes = {n: reduction(n) for n in (1, 10_000, 100_000, 1_000_000)} if n_ranks > 1 else {}
    if rank == 0:
        torch.save((times, calls, n_bytes, sizes), f"{folder}/found")
    if n_ranks > 1:
        dist.destroy_process_group()


def reduction(n, repeats=20):
    "Milliseconds of the sum of `n` numbers over ranks, without a count."
    x = torch.ones(n)
    out = []
    for _ in range(repeats):
        start = perf_counter()
        ranks.collectives.total(x)
        out.append(1000 * (perf_counter() - start))
    return statistics.median(out)


def measure(*args):
    n_ranks = args[0]
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(one_rank, (folder, *args), nprocs=n_ranks, start_method="spawn")
        return torch.load(f"{folder}/found")


def main():
    args = options_of(
        __doc__,
        cases=["trpo:25000x256", "trpo:2500x64", "ppo:2048x64"],
        ranks=2,
        repeats=5,
        updates=3,
    )
    args.add_argument(
        "--gloo", action="store_true", help="sum by gloo, as ranks of several machines do"
    )
    args = args.parse_args()
    rows = []
    sums = {}
    for case in args.cases:
        kind, sizes = case.split(":")
        n_rows, width = map(int, sizes.split("x"))
        alone = []
        together = []
        for _ in range(args.repeats):
            alone.append(measure(1, kind, n_rows, width, args.updates, args.gloo)[0])
            times, calls, n_bytes, found = measure(
                args.ranks, kind, n_rows, width, args.updates, args.gloo
            )
            together.append(times)
            for n, x in found.items():
                sums.setdefault(n, []).append(x)
        whole, policy = (
            [x / y for x, y in zip(*times)] for times in zip(zip(*alone), zip(*together))
        )
        rows.append(
            [
                f"{kind.upper()}, {n_rows:,} rows, 2 x {width}",
                spread([t for t, _ in alone], "{:.0f}"),
                spread([t for t, _ in together], "{:.0f}"),
                spread(whole),
                "-" if math.isnan(policy[0]) else spread(policy),
                f"{calls:.0f}",
                f"{n_bytes / 1e6:.2f}",
            ]
        )
        print(rows[-1], flush=True)
    print(header())
    columns = [
        "update",
        "one process [ms]",
        f"{args.ranks} ranks [ms]",
        "times as fast",
        "its policy part",
        "calls",
        "MB from each rank",
    ]
    print(table(columns, rows))
    print(
        "\n"
        + table(
            ["numbers that are summed", *(f"{n:,}" for n in sums)],
            [["[ms]", *(spread(x) for x in sums.values())]],
        )
    )


if __name__ == "__main__":
    main()
