"""What a Ray cluster of this machine costs, compared with worker processes and with one process.

    python benchmarks/ray_reading.py [--only throughput overhead weights] [--repeats 5] [--seconds 2]

Two workers with 32 environments each, on-policy fragments with GAE, T = 128, actor and critic MLPs 2x64, one torch thread. `Images` is that
of `workers.py`. Ray is started before the clocks.
"""

from itertools import islice
from time import perf_counter, thread_time

import numpy as np
import torch
from collect import installed
from report import header, options_of, spread, table
from workers import Images, fragments, name, pipeline, rate

from rollpipe.pipes import (
    DataLoader2,
    EnvStepper,
    FragmentCollector,
    Lanes,
    ProcessReading,
    RayReading,
)
from rollpipe.pipes.cluster.door import lease
from rollpipe.pipes.cluster.ray_crew import Arrived
from rollpipe.pipes.graph.modules import bump_version

SERVICES = {"worker processes": ProcessReading, "Ray": RayReading}


def throughput(args):
    "Environment steps per second; the ratio is that of Ray to worker processes, run after run (wanted: 0.9)."
    rows = []
    for env in args.envs:
        for lag in (0, 1):
            found = {key: [] for key in ("none", *SERVICES)}
            for _ in range(args.repeats):
                found["none"].append(rate(pipeline(env, 32, 2), None, args.seconds))
                for key, service in SERVICES.items():
                    found[key].append(rate(pipeline(env, 32, 2), service(2, lag=lag), args.seconds))
            ratio = spread([x / y for x, y in zip(found["Ray"], found["worker processes"])])
            rows.append(
                [name(env), lag, *(spread(rates, "{:,.0f}") for rates in found.values()), ratio]
            )
    print(
        table(
            [
                "environment",
                "lag",
                "in-process [steps/s]",
                *(f"{key} [steps/s]" for key in SERVICES),
                "ratio",
            ],
            rows,
        )
    )


def timed(owner, method, times) -> None:
    "Have a method of a class append the seconds of each call to `times`."
    plain = getattr(owner, method)

    def call(*args, **kwargs):
        begin = perf_counter()
        try:
            return plain(*args, **kwargs)
        finally:
            times.append(perf_counter() - begin)

    setattr(owner, method, call)


def overhead(args):
    """Microseconds for a fragment of 8 environments: from complete in the worker to usable here; processor time of the driver's thread,
    also while the worker collects (it polls for worker processes); and the copy out of the store, which is a part of both."""
    rows = []
    copies = []
    n = 40 * args.repeats
    timed(Arrived, "put", copies)
    for env in ("CartPole-v1", Images):
        for key, service in SERVICES.items():
            copies.clear()
            with DataLoader2(fragments(env), reading_service=service(1)) as loader:
                items = iter(loader)
                waits = []
                driver = []
                for _ in range(10):
                    next(items)
                for _ in range(n):
                    begin = perf_counter()
                    computed = thread_time()
                    item = next(items)
                    driver.append(thread_time() - computed)
                    record = loader.reading_service.records[-1]
                    waits.append(perf_counter() - begin - record.end + record.begin)
                    del item
            rows.append(
                [
                    name(env),
                    key,
                    *map(quartiles, (waits, driver, copies[10:])),
                    f"{record.copied_bytes:,}",
                ]
            )
    print(
        table(
            [
                "environment, B=8",
                "workers",
                "beyond collecting [us], median (quartiles)",
                "driver [us]",
                "copy [us]",
                "bytes",
            ],
            rows,
        )
    )


def quartiles(seconds) -> str:
    "Median and quartiles in microseconds; a dash for none."
    if not seconds:
        return "-"
    return "{1:,.0f} ({0:,.0f}-{2:,.0f})".format(
        *np.percentile(1e6 * np.array(seconds), [25, 50, 75])
    )


class Heavy(torch.nn.Module):
    "An actor whose parameters are only there to be sent."

    def __init__(self, n):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(n))

    def step(self, stepno, *args, hx, virtual):
        return torch.zeros_like(stepno), (), {}

    def reset(self, hx, at):
        return hx


def weights(args):
    "Milliseconds for a fragment of one step in two workers, with and without new weights."
    rows = []
    for n in (10_000, 1_000_000):
        for key, service in SERVICES.items():
            times = {False: [], True: []}
            actor = Heavy(n)
            pipe = Lanes(FragmentCollector(EnvStepper("CartPole-v1", actor), 1), 2, 0)
            with DataLoader2(pipe, reading_service=service(2)) as loader:
                items = iter(loader)
                for _ in islice(items, 10):
                    pass
                for k in range(20 * args.repeats):
                    if new := k % 2 == 0:
                        with torch.no_grad():
                            actor.weight += 1
                        bump_version(actor)
                    begin = perf_counter()
                    next(items)
                    times[new].append(1e3 * (perf_counter() - begin))
            rows.append([f"{n:,}", key, spread(times[True]), spread(times[False])])
    print(table(["parameters", "workers", "with new weights [ms]", "without [ms]"], rows))


PARTS = dict(throughput=throughput, overhead=overhead, weights=weights)


def main():
    args = options_of(__doc__, envs=["CartPole-v1", "HalfCheetah-v5", "Images"], repeats=5)
    args.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    args.add_argument("--seconds", type=float, default=2.0, help="length of one run")
    args = args.parse_args()
    torch.set_num_threads(1)
    print(header(("torch", "torchdata", "gymnasium", "numpy", "ray", "rollpipe")))
    args.envs = [
        Images if env == "Images" else env for env in args.envs if env == "Images" or installed(env)
    ]
    release = lease(None, args)
    for part in args.only:
        print(f"\n{' '.join(PARTS[part].__doc__.split())}\n")
        PARTS[part](args)
    release()  # at the end, so that no part starts Ray anew


if __name__ == "__main__":
    main()
