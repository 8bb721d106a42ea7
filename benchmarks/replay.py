"""Microseconds of processor time to draw 256 transitions from a replay memory of a million steps, one thread.

    python benchmarks/replay.py [--capacity 1000000] [--size 256] [--rounds 2000] [--repeats 7] [--path FOLDER]

Two streams of random steps, 8 environments with fragments of 64 steps, episodes of 200 steps of which half are cut off: one shaped like
CartPole (4 float32, two Q values), one like MinAtar (10x10x4 bool, six Q values). The memory is full, and wrapped around. "whole sample"
is the call of a learner, which gives a `Fragment`. The floor gathers only the rows of the observations, `obs[index]` and `obs[index +
1]`, from one tensor, because every replay memory must do that. Ratios are to this floor. "priorities" is the update after a sample, and
"add" is the cost of adding a fragment, for each step. Repeats are interleaved.
"""

from functools import partial
from time import process_time

import numpy as np
import torch
from report import header, options_of, spread, table

from rollpipe.pipes import Fragment, ReplayMemory

T = 64
B = 8
EPISODE = 200
STREAMS = {"CartPole-like": ((4,), torch.float32, 2), "MinAtar-like": ((10, 10, 4), torch.bool, 6)}


def fragment(seq, shape, dtype, n_actions):
    "The fragment number `seq` of a stream: [T, B]."
    row = torch.arange(seq * T, seq * T + T + 1)[:, None].expand(
        -1, B
    ) + EPISODE // B * torch.arange(B)
    stepno = row % EPISODE
    episode = row // EPISODE
    fin = stepno == 0
    noise = torch.rand(T + 1, B, *shape)
    obs = noise < 0.1 if dtype == torch.bool else noise
    q = torch.rand(T + 1, B, n_actions)
    term = fin & (episode % 2 == 0)
    t, b = (fin & ~term)[1:].nonzero(as_tuple=True)
    column = torch.zeros(B, dtype=torch.int64)
    return Fragment.from_steps(
        obs,
        torch.randint(n_actions, (T, B)),
        torch.rand(T, B),
        term[1:],
        (fin & ~term)[1:],
        last_obs=obs[t + 1, b],
        actor=dict(q=q),
        last_actor=dict(q=q[t + 1, b]),
        stepno=stepno[0],
        lane=column,
        seq=column + seq,
        version=column,
    )


def filled(stream, capacity, **options):
    "A memory that was filled one and a quarter times, and microseconds per step of the last fragments."
    memory = ReplayMemory(capacity, seed=0, **options)
    fragments = [fragment(i, *STREAMS[stream]) for i in range(25)]
    spent = []
    for seq in range(5 * capacity // (4 * T * B)):
        f = fragments[seq % 25]  # 25 fragments are 8 episodes of each environment
        start = process_time()
        memory.add(f._replace(seq=torch.full((B,), seq)))
        spent.append((process_time() - start) / (T * B) * 1e6)
    return memory, spent[-100:]


def floor(stream, capacity, size):
    shape, dtype, _ = STREAMS[stream]
    obs = torch.zeros(capacity, *shape, dtype=dtype)
    rng = np.random.default_rng(0)
    obs.random_(2)

    def draw():
        index = torch.from_numpy(rng.integers(capacity - 1, size=size))
        return obs[index], obs[index + 1]

    return draw


def timed(run, rounds):
    start = process_time()
    for _ in range(rounds):
        run()
    return (process_time() - start) / rounds * 1e6


def measure(stream, args):
    "Rows of the table."
    uniform, added = filled(stream, args.capacity, path=args.path and f"{args.path}/uniform")
    ranked, added_ranked = filled(
        stream, args.capacity, prioritized=True, path=args.path and f"{args.path}/prioritized"
    )
    indices = iter(
        [ranked.sample(args.size).index for _ in range(100)]
        * (args.rounds * args.repeats // 100 + 1)
    )
    errors = torch.rand(args.size)
    for _ in range(2000):
        ranked.prioritize(ranked.sample(args.size).index, errors)
    runs = {
        "floor": floor(stream, args.capacity, args.size),
        "uniform": partial(uniform.sample, args.size),
        "prioritized": partial(ranked.sample, args.size),
        "update": lambda: ranked.prioritize(next(indices), errors),
    }
    times = {name: [] for name in runs}
    for _ in range(args.repeats):
        for name, run in runs.items():
            times[name].append(timed(run, args.rounds))
    step = (
        uniform.store.records.dtype.itemsize
        + uniform.store.links.next.itemsize
        + uniform.sampler.starts.itemsize
    )
    row = lambda name, update, added, more: [
        stream,
        name,
        spread(times[name], "{:.0f}"),
        spread([x / y for x, y in zip(times[name], times["floor"])], "{:.1f}"),
        update,
        spread(added, "{:.2f}"),
        step + more,
    ]
    return [
        [stream, "floor: two rows of obs", spread(times["floor"], "{:.0f}"), "1", "", "", ""],
        row("uniform", "", added, 0),
        row(
            "prioritized",
            spread(times["update"], "{:.0f}"),
            added_ranked,
            ranked.sampler.tree.nodes.nbytes // args.capacity,
        ),
    ]


if __name__ == "__main__":
    parser = options_of(__doc__, capacity=1_000_000, size=256, rounds=2000, repeats=7)
    parser.add_argument("--path", help="map the steps to files below this folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(header())
    rows = [row for stream in STREAMS for row in measure(stream, args)]
    print(
        table(
            [
                "stream",
                "sampling",
                f"whole sample of {args.size} [us]",
                "ratio to the floor",
                "priorities [us]",
                "add [us/step]",
                "memory [bytes/step]",
            ],
            rows,
        )
    )
