"""Milliseconds of an update with one of torch's threads and with more, on idle cores and beside other processes.

    python benchmarks/threads.py [--threads 1,2] [--busy 2] [--repeats 5]

PPO on Pendulum-v1: 2 epochs over 1024 steps in minibatches of 256, policy and critic with two hidden layers each. The convolutions are
those of Mnih et al. 2015, on 64 images of 84x84. Wall time, median. A busy process computes without a pause.
"""

import subprocess
import sys
from contextlib import contextmanager
from time import perf_counter

import torch
from report import header, options_of, spread, table
from torch import nn

from rollpipe.agents import PPO
from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes import on_policy
from rollpipe.pipes.graph.modules import torch_threads

ENV = "Pendulum-v1"


def ppo(width):
    "An update of PPO, and the number of weights."
    hidden = (width, width)
    actor = MLPPolicy.for_env(ENV, hidden=hidden, seed=0)
    critic = Critic.for_env(ENV, hidden=hidden, seed=1)
    agent = PPO(actor, critic, epochs=2)
    batch = next(iter(on_policy(ENV, actor, critic, n_envs=8, n_steps=128, seed=0)))
    return lambda: agent.update(batch), [*actor.parameters(), *critic.parameters()]


def convolutions():
    "A step of Adam on the mean square of a network of images, and the number of weights."
    net = nn.Sequential(
        *(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU()),
        nn.Linear(512, 4),
    )
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    images = torch.rand(64, 4, 84, 84)

    def step():
        optimizer.zero_grad()
        net(images).square().mean().backward()
        optimizer.step()

    return step, [*net.parameters()]


@contextmanager
def busy(n):
    "`n` other processes compute meanwhile."
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def milliseconds(update, threads, repeats):
    with torch_threads(threads):
        update()
        times = []
        for _ in range(repeats):
            start = perf_counter()
            update()
            times.append((perf_counter() - start) * 1e3)
    return spread(times)


if __name__ == "__main__":
    parser = options_of(__doc__, repeats=5, busy=2)
    parser.add_argument("--threads", default="1,2")
    args = parser.parse_args()
    numbers = [int(n) for n in args.threads.split(",")]
    cases = {f"PPO, {w}x{w}": (ppo, w) for w in (64, 256, 512, 1024)} | {"images": (convolutions,)}
    print(header())
    rows = []
    for name, (make, *sizes) in cases.items():
        update, parameters = make(*sizes)
        row = [name, f"{sum(p.numel() for p in parameters):,}"]
        for n_busy in (0, args.busy):
            with busy(n_busy):
                row += [milliseconds(update, n, args.repeats) for n in numbers]
        rows.append(row)
    titles = [f"{n} threads, {state}" for state in ("idle", "busy") for n in numbers]
    print(table(["update", "weights", *titles], rows))
