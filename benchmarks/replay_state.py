"""What it costs to save a replay memory of a million steps, of which a thousand are new.

python benchmarks/replay_state.py [--small]
"""

import argparse
import tempfile
from time import perf_counter

import numpy as np
import torch

from rollpipe.pipes import Fragment, ReplayMemory
from rollpipe.pipes.keeping.chunks import ChunkFolder


def fragment(shape, dtype, seq, T=125, B=8):
    "A fragment of a thousand steps."
    obs = torch.from_numpy(np.random.default_rng(seq).integers(0, 255, (T + 1, B, *shape))).to(
        dtype
    )
    no = torch.zeros(T, B, dtype=torch.bool)
    lane = torch.zeros(B, dtype=torch.int64)
    return Fragment.from_steps(
        obs,
        torch.zeros(T, B, dtype=torch.int64),
        torch.zeros(T, B),
        no,
        no,
        last_obs=obs[0, :0],
        lane=lane,
        seq=lane + seq,
        version=lane,
    )


def measured(name, shape, dtype, capacity, prioritized, n=7):
    memory = ReplayMemory(capacity, prioritized=prioritized, seed=0)
    parts = [fragment(shape, dtype, 0), fragment(shape, dtype, 1)]
    for k in range(capacity // 1000):
        memory.add(parts[k % 2]._replace(seq=torch.full((8,), k)))
    with tempfile.TemporaryDirectory() as folder:
        chunks = ChunkFolder(folder)
        start = perf_counter()
        memory.get_state(chunks)
        whole = perf_counter() - start
        seconds = []
        written = []
        for k in range(n):
            memory.add(parts[k % 2]._replace(seq=torch.full((8,), k + capacity)))
            for _ in range(30 * prioritized):
                index = memory.sample(256).index
                memory.prioritize(index, torch.rand(256))
            before = set(chunks.names)
            start = perf_counter()
            memory.get_state(chunks)
            seconds.append(perf_counter() - start)
            written.append(sum((chunks.path / x).stat().st_size for x in chunks.names - before))
        state = memory.get_state(chunks)
        start = perf_counter()
        ReplayMemory(capacity, prioritized=prioritized).set_state(state, chunks)
        size = sum(rows.nbytes for rows in (memory.store.records, memory.store.links.next))
        print(
            f"| {name} | {size / 1e6:,.0f} | {whole:.2f} | {1000 * np.median(seconds):.0f} | {np.median(written) / 1e6:.1f} | "
            f"{perf_counter() - start:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tenth of the steps")
    scale = 10 if parser.parse_args().small else 1
    print(
        "| memory | MB | all of it [s] | 1,000 new steps [ms] | written [MB] | loading [s] |\n|---|---|---|---|---|---|"
    )
    measured("CartPole", (4,), torch.float32, 1_000_000 // scale, False)
    measured("CartPole, priorities", (4,), torch.float32, 1_000_000 // scale, True)
    measured("HalfCheetah", (17,), torch.float32, 1_000_000 // scale, False)
    measured("images, 84x84 (100,000 steps)", (84, 84), torch.uint8, 100_000 // scale, False)
