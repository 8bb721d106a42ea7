"""The cost of `profile`: how much slower a graph collects while its stages have clocks.

    python benchmarks/profiling.py [--windows 40] [--seconds 0.2]

Two streams of the same graph, one with clocks, take turns: each collects for a window, and then the other. The cost is the median of the
ratios of neighbouring windows, in processor time, so that other programs of the machine count little. On-policy fragments with GAE,
T = 128, MLPs 2x64 tanh, one thread; the replay draws a sample of 256 for every 4 steps. The
target is a cost below 3 %.
"""

from statistics import median, quantiles
from time import process_time

from report import begun, options_of, table

from rollpipe.layers import Critic, MLPPolicy, QPolicy
from rollpipe.pipes import copy_graph, on_policy, replayed
from rollpipe.pipes.profiling.clock import Clock, put_clocks, stages_of


def rate(items, seconds):
    "Items per second in a window."
    n = 0
    start = process_time()
    while (now := process_time()) - start < seconds or not n:
        for _ in getattr(next(items), "samples", ()):
            pass
        n += 1
    return n / (now - start)


def clocked(pipe):
    graph = copy_graph(pipe)
    stages = stages_of(pipe)
    return put_clocks(graph, stages, Clock(len(stages) + 2))


def graphs():
    "The graphs to measure: name, environments, pipe."
    for env in ("CartPole-v1", "Pendulum-v1"):
        actor, critic = (c.for_env(env, normalize=False, seed=0) for c in (MLPPolicy, Critic))
        for n_envs in (1, 8, 64):
            yield (
                env,
                n_envs,
                on_policy(env, actor, critic, n_envs=n_envs, n_steps=128, seed=0, info_keys=()),
            )
    actor = QPolicy.for_env("CartPole-v1", seed=0)
    yield (
        "CartPole-v1, replay",
        8,
        replayed("CartPole-v1", actor, n_envs=8, n_steps=4, seed=0, info_keys=()),
    )


def main():
    args = options_of(__doc__, windows=40, seconds=0.2)
    args = begun(args)
    rows = []
    for name, n_envs, pipe in graphs():
        streams = [iter(pipe), iter(clocked(pipe))]
        costs = []
        for stream in streams:
            rate(stream, args.seconds)  # makes the environments and fills the memory
        for k in range(args.windows):
            order = (0, 1) if k % 2 else (1, 0)
            rates = {which: rate(streams[which], args.seconds) for which in order}
            costs.append(rates[0] / rates[1] - 1)
        low, _, high = quantiles(costs, n=4)
        rows.append([name, n_envs, f"{median(costs):.2%}", f"{low:.2%} to {high:.2%}"])
        print(*rows[-1], flush=True)
    print(table(["environment", "B", "cost", "half of the ratios are in"], rows))


if __name__ == "__main__":
    main()
