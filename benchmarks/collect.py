"""Environment steps per second through the pipeline, as a ratio to hand-written loops in the same run.

    python benchmarks/collect.py [--envs CartPole-v1 Pendulum-v1 HalfCheetah-v5] [--sizes 1 8 64] [--repeats 5] [--policy mlp|gru]

On-policy fragments with GAE, T = 128, separate actor and critic MLPs 2x64 tanh, one thread. There are three floors, all without GAE and
without checks. Two are in eager torch: one calls the critic at every step, as most code does, the other once per fragment, as the pipeline
does. The third one does its inference in numpy.
The pipeline runs tick by tick, because a pipe stands between stepper and collector; as the recipe makes it; and with the actor in ONNX
Runtime. All runs are interleaved. A GRU policy has no floor, so its ratios are those to the pipeline that runs tick by tick.
"""

import gc
from time import perf_counter

import gymnasium as gym
import torch
from floor import Floor, NumpyFloor, Passing
from report import begun, options_of, spread, table

from rollpipe.layers import Critic, MLPPolicy, RecurrentPolicy
from rollpipe.pipes import EnvStepper, on_policy, returns

T = 128


PIPELINES = {
    "tick by tick": dict(edits=[Passing.inserter(after=EnvStepper)]),
    "pipeline": {},
    "ONNX Runtime": dict(engine="onnxruntime"),
}


POLICIES = {"mlp": MLPPolicy, "gru": RecurrentPolicy}


def pipeline(env_id, n_envs, policy="mlp", **options):
    "A function that collects one fragment with advantages."
    actor, critic = (c.for_env(env_id, normalize=False, seed=0) for c in (POLICIES[policy], Critic))
    fragments = iter(
        on_policy(env_id, actor, critic, n_envs=n_envs, n_steps=T, seed=0, info_keys=(), **options)
    )
    return lambda: next(fragments)


def seconds(collect, n):
    start = perf_counter()
    for _ in range(n):
        collect()
    return perf_counter() - start


def gae_seconds(fragment, n=50):
    "Seconds of the advantage estimate alone, the critic's values given."
    rew = fragment.state.rew[1:]
    fin = fragment.state.fin[1:]
    term = fragment.term[1:]
    v = torch.zeros_like(rew)
    return seconds(lambda: returns.gae(rew, v, v, 0.99 * (~term), 0.95, cut=fin), n) / n


def rates_of(runs, n_envs, repeats, budget):
    "Steps per second of the `runs`, interleaved; a run takes about `budget` seconds."
    for collect in runs.values():
        seconds(collect, 2)
    n = max(1, round(budget / seconds(runs["tick by tick"], 1)))
    rates = {name: [] for name in runs}
    for _ in range(repeats):
        for name, collect in runs.items():
            gc.collect()
            rates[name].append(n * T * n_envs / seconds(collect, n))
    return rates


def measure_recurrent(env_id, n_envs, repeats, budget):
    "A row for a GRU policy: steps/s, and the ratios to the pipeline that runs tick by tick."
    rates = rates_of(
        {name: pipeline(env_id, n_envs, "gru", **options) for name, options in PIPELINES.items()},
        n_envs,
        repeats,
        budget,
    )
    ratios = [
        spread([a / b for a, b in zip(x, rates["tick by tick"])])
        for name, x in rates.items()
        if name != "tick by tick"
    ]
    return [env_id, n_envs, *(spread(x, "{:,.0f}") for x in rates.values()), *ratios]


def measure(env_id, n_envs, repeats, budget):
    "A row of each table for one environment and batch size: steps/s, and the ratios to the floors."
    floors = {
        "critic per step": Floor(env_id, n_envs, T).collect,
        "critic per fragment": Floor(env_id, n_envs, T, values="fragment").collect,
        "numpy": NumpyFloor(env_id, n_envs, T).collect,
    }
    runs = {
        **floors,
        **{name: pipeline(env_id, n_envs, **options) for name, options in PIPELINES.items()},
    }
    rates = rates_of(runs, n_envs, repeats, budget)
    share = [
        gae_seconds(runs["tick by tick"]()) * rate / (T * n_envs) for rate in rates["tick by tick"]
    ]
    ratios = [
        spread([p / f for p, f in zip(rates[name], rates[floor])])
        for floor in floors
        for name in PIPELINES
    ]
    return [
        env_id,
        n_envs,
        *(spread(x, "{:,.0f}") for x in rates.values()),
        spread(share, "{:.1%}"),
    ], [env_id, n_envs, *ratios]


def installed(env_id) -> bool:
    "Whether the environment can be made; prints a message if not."
    try:
        gym.make(env_id).close()
    except gym.error.DependencyNotInstalled as e:
        print(f"{env_id} left out: {e}\n")
        return False
    return True


def main():
    args = options_of(
        __doc__, envs=["CartPole-v1", "Pendulum-v1", "HalfCheetah-v5"], sizes=[1, 8, 64], repeats=5
    )
    args.add_argument("--policy", choices=list(POLICIES), default="mlp")
    args.add_argument("--seconds", type=float, default=1.0, help="length of one run")
    args = begun(args)
    envs = [env for env in args.envs if installed(env)]
    if args.policy == "gru":
        rows = [
            measure_recurrent(env, B, args.repeats, args.seconds)
            for env in envs
            for B in args.sizes
        ]
        return print(
            table(
                [
                    "environment",
                    "B",
                    *PIPELINES,
                    *(f"{name} / tick by tick" for name in list(PIPELINES)[1:]),
                ],
                rows,
            )
        )
    rates, ratios = zip(
        *(measure(env, B, args.repeats, args.seconds) for env in envs for B in args.sizes)
    )
    floors = ["critic per step", "critic per fragment", "numpy"]
    print("Steps per second:\n")
    print(
        table(
            [
                "environment",
                "B",
                *(f"floor, {floor}" for floor in floors),
                *PIPELINES,
                "GAE of collecting, tick by tick",
            ],
            rates,
        )
    )
    print("\nRatios to the floors:\n")
    print(
        table(
            ["environment", "B", *(f"{name} / {floor}" for floor in floors for name in PIPELINES)],
            ratios,
        )
    )


if __name__ == "__main__":
    main()
