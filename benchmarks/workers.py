"""The gains and costs of worker processes, compared with the same graph without them or with torchdata's own workers.

    python benchmarks/workers.py [--only throughput division torchdata transport memory weights start] [--repeats 5] [--seconds 2]

On-policy fragments with GAE, T = 128, actor and critic MLPs 2x64, one torch thread. `Images` is an environment of 84x84x4 bytes whose
step does nothing; its actor and critic read only every twelfth pixel, so that the transport of the images is measured.
"""

import gc
import os
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from time import monotonic, perf_counter, process_time

import gymnasium as gym
import numpy as np
import torch
from collect import installed
from report import begun, options_of, spread, table

from rollpipe.layers import Critic, MLPPolicy
from rollpipe.pipes import (
    DataLoader2,
    EnvStepper,
    FragmentCollector,
    FragmentStacker,
    ProcessReading,
    on_policy,
    remove,
)
from rollpipe.pipes.workers.channel import WeightPublisher

T = 128


class Images(gym.Env):
    "Repeats a few pictures, in episodes that are cut off after 500 steps."

    observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.pictures = np.random.default_rng(0).integers(0, 256, (16, 84, 84, 4), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.pictures[0], {}

    def step(self, action):
        self.count += 1
        return self.pictures[self.count % 16], 1.0, False, self.count == 500, {}


class Glance(torch.nn.Module):
    "Every twelfth pixel `[..., 84, 84, 4]` as features `[..., 196]`."

    n_out, is_normalized = 196, True

    def forward(self, obs):
        return obs[..., ::12, ::12, :].flatten(-3).float() / 255


def networks(env):
    options = dict(encoder=lambda space: Glance()) if env is Images else {}
    return (c.for_env(env, normalize=False, seed=0, **options) for c in (MLPPolicy, Critic))


def pipeline(env, n_envs, lanes, joined=True, **kwargs):
    pipe = on_policy(
        env, *networks(env), n_envs=n_envs, n_steps=T, lanes=lanes, seed=0, info_keys=(), **kwargs
    )
    return pipe if joined else remove(pipe, FragmentStacker)


def rate(pipe, service, seconds, tell=lambda rate: rate):
    """Environment steps per second, after a warm-up of the same duration. It begins with the first batch, when all workers have started.
    `tell` is called before they end."""
    with DataLoader2(pipe, reading_service=service) as loader:
        items = iter(loader)
        next(items)
        begin = perf_counter()
        while perf_counter() - begin < seconds:
            next(items)  # until all memory has been used once
        gc.collect()
        start = perf_counter()
        steps = 0
        while (duration := perf_counter() - start) < seconds:
            steps += next(items).valid.numel()
        return tell(steps / duration)


def independent(env, n_envs, seconds):
    "The total rate of two independent processes, which is the most that this machine can give at the moment."
    processes = torch.multiprocessing.get_context("fork").Pool(2)
    with processes:
        return sum(
            processes.starmap(rate, [(pipeline(env, n_envs, 1), None, seconds)] * 2, chunksize=1)
        )


def name(env):
    return env if isinstance(env, str) else env.__name__


def throughput(args):
    "Two workers against none."
    rows = []
    for env in args.envs:
        for n_envs in (8, 32):
            rates = {key: [] for key in ("none", "twice", 0, 1, None, "apart")}
            for _ in range(args.repeats):
                rates["none"].append(rate(pipeline(env, n_envs, 1), None, args.seconds))
                rates["twice"].append(independent(env, n_envs, args.seconds))
                for lag in (0, 1, None):
                    rates[lag].append(
                        rate(pipeline(env, n_envs, 2), ProcessReading(2, lag=lag), args.seconds)
                    )
                rates["apart"].append(
                    rate(
                        pipeline(env, n_envs, 2, joined=False),
                        ProcessReading(2, lag=None),
                        args.seconds,
                    )
                )
            ratios = [
                spread([x / y for x, y in zip(rates[key], rates["none"])])
                for key in (0, 1, None, "apart", "twice")
            ]
            rows.append(
                [
                    name(env),
                    n_envs,
                    spread(rates["none"], "{:,.0f}"),
                    spread(rates[1], "{:,.0f}"),
                    *ratios,
                ]
            )
    print(
        table(
            [
                "environment",
                "B of a lane",
                "in-process [steps/s]",
                "2 workers, lag 1 [steps/s]",
                "ratio, lag 0",
                "lag 1",
                "free running",
                "free running, fragments not joined",
                "two independent processes",
            ],
            rows,
        )
    )


def busy(pids) -> list:
    "Seconds that each of these processes has computed, to a hundredth."
    ticks = os.sysconf("SC_CLK_TCK")
    return [
        sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[11:13])) / ticks
        for pid in pids
    ]


def computed(pipe, service, seconds) -> tuple:
    "Microseconds of computing for a step in this process, and in the busiest worker."
    with DataLoader2(pipe, reading_service=service) as loader:
        items = iter(loader)
        steps = 0
        for _ in range(8):
            next(items)
        pids = [state["pid"] for state in loader.reading_service.health()] if service else []
        begin = perf_counter()
        here = process_time()
        there = busy(pids)
        while perf_counter() - begin < seconds:
            steps += next(items).valid.numel()
        return 1e6 * (process_time() - here) / steps, max(
            [1e6 * (y - x) / steps for x, y in zip(there, busy(pids))], default=0
        )


def division(args):
    "Eight environments of CartPole, all in this process or four in each of two workers, with torch and with ONNX Runtime."
    rows = []
    make = lambda n_envs, lanes: pipeline("CartPole-v1", n_envs, lanes, engine="onnxruntime")
    ways = {
        "8 here": (8, 1, None),
        "4 here": (4, 1, None),
        **{f"2 workers, lag {lag}": (4, 2, lag) for lag in (0, 1, None)},
    }
    service = lambda lanes, lag: ProcessReading(2, lag=lag) if lanes == 2 else None
    found = {key: [] for key in ways}
    for _ in range(args.repeats):
        for key, (n_envs, lanes, lag) in ways.items():
            found[key].append(
                (
                    rate(make(n_envs, lanes), service(lanes, lag), args.seconds),
                    *computed(make(n_envs, lanes), service(lanes, lag), args.seconds),
                )
            )
    for key, runs in found.items():
        rates, here, there = zip(*runs)
        ratios = [x / y for x, (y, *_) in zip(rates, found["8 here"])]
        rows.append(
            [
                key,
                spread(rates, "{:,.0f}"),
                spread(ratios),
                spread(here, "{:.1f}"),
                spread(there, "{:.1f}"),
            ]
        )
    print(
        table(
            [
                "environments",
                "steps/s",
                "times 8 here",
                "computing here [us/step]",
                "in a worker [us/step]",
            ],
            rows,
        )
    )


THEIRS = """
import sys; sys.path.insert(0, {here!r})
from torchdata.dataloader2 import MultiProcessingReadingService
from workers import Images, pipeline, rate, torch
torch.set_num_threads(1)
service = MultiProcessingReadingService(2, 'fork', worker_prefetch_cnt={ahead}, main_prefetch_cnt={ahead})
rate(pipeline({env}, 8, 1), service, {seconds}, lambda rate: print(rate, flush=True))
"""


def theirs(env, ahead, seconds) -> float:
    "The rate under torchdata's workers, in a process group of its own, because they do not always end."
    code = THEIRS.format(
        here=sys.path[0], ahead=ahead, env="Images" if env is Images else repr(env), seconds=seconds
    )
    run = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        return float(run.stdout.readline())
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        for left in Path("/dev/shm").glob("torch_*"):  # segments of processes that have ended
            if not Path("/proc", left.name.split("_")[1]).exists():
                left.unlink(missing_ok=True)


def torchdata(args):
    "The same graph under torchdata's workers, with the best of its settings for fetching ahead."
    if sys.version_info >= (3, 13):
        return print("torchdata has no workers from Python 3.13 on.")
    rows = []
    for env in ("CartPole-v1", Images):
        ours = []
        peer = {ahead: [] for ahead in (0, 1, 2, 10)}
        for _ in range(args.repeats):
            ours.append(
                rate(pipeline(env, 8, 2, joined=False), ProcessReading(2, lag=None), args.seconds)
            )  # as with torchdata
            for ahead, rates in peer.items():
                rates.append(theirs(env, ahead, args.seconds))
        ahead, best = max(peer.items(), key=lambda item: np.median(item[1]))
        rows.append(
            [
                name(env),
                spread(ours, "{:,.0f}"),
                spread(best, "{:,.0f}"),
                ahead,
                spread([x / y for x, y in zip(ours, best)]),
            ]
        )
    print(
        table(
            [
                "environment",
                "ProcessReading [steps/s]",
                "torchdata's [steps/s]",
                "its best prefetch",
                "ratio",
            ],
            rows,
        )
    )


def fragments(env):
    return FragmentCollector(EnvStepper(env, next(networks(env)), 8, seed=0, info_keys=()), T)


def answers(link, env):
    "A worker of `queued`."
    items = iter(fragments(env))
    while link.recv():
        link.send((next(items), monotonic()))


def queued(env, n) -> list:
    "Seconds from complete to usable if torch's own multiprocessing sends a fragment, with one shared segment per tensor."
    link, theirs = torch.multiprocessing.Pipe()
    process = torch.multiprocessing.get_context("fork").Process(
        target=answers, args=(theirs, env), daemon=True
    )
    process.start()
    times = []
    for _ in range(n):
        link.send(True)
        _, end = link.recv()
        times.append(monotonic() - end)
    link.send(False)
    process.join()
    return times


def sent(env, n, **options) -> tuple:
    "Seconds until a complete fragment is usable by the learner, and bytes copied."
    with DataLoader2(fragments(env), reading_service=ProcessReading(1, **options)) as loader:
        for item in islice(loader, n):
            del item
        records = list(loader.reading_service.records)
    return [r.received - r.end for r in records], int(np.median([r.copied_bytes for r in records]))


def transport(args):
    "Time from a complete fragment in the worker to a usable one in the learner's process."
    rows = []
    n = 40
    for env in ("CartPole-v1", Images):
        runs = [
            (queued(env, n), *sent(env, n), *sent(env, n, spin=1.0)) for _ in range(args.repeats)
        ]
        theirs, usual, copied, spinning, _ = zip(
            *((q[10:], u[10:], c, s[10:], d) for q, u, c, s, d in runs)
        )
        quartiles = lambda runs: "{1:,.0f} ({0:,.0f}-{2:,.0f})".format(
            *np.percentile(1e6 * np.array(runs), [25, 50, 75])
        )
        rows.append([name(env), *map(quartiles, (usual, spinning, theirs)), f"{copied[-1]:,}"])
    print(
        table(
            [
                "environment, B=8",
                "from complete to usable [us], median (quartiles)",
                "with `spin=1`",
                "torch's multiprocessing",
                "bytes copied per fragment, once",
            ],
            rows,
        )
    )


def share(pid) -> float:
    "Memory of a process in MB; shared pages are divided among the processes that share them."
    with open(f"/proc/{pid}/smaps_rollup") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("Pss:")) / 1024


def memory(args):
    "Memory of parent and workers together, and its growth over 10 000 fragments."
    rows = []
    n = args.fragments
    for method in ("fork", "spawn"):
        alone = share("self")
        pipe = FragmentCollector(
            EnvStepper("CartPole-v1", next(networks("CartPole-v1")), 2, seed=0, info_keys=()), 8
        )
        with DataLoader2(
            pipe, reading_service=ProcessReading(2, lag=1, start_method=method)
        ) as loader:
            items = iter(loader)

            def now():
                return share("self") + sum(
                    share(state["pid"]) for state in loader.reading_service.health()
                )

            for _ in range(500):
                next(items)
            begin = now()
            for _ in range(n):
                next(items)
            rows.append(
                [
                    method,
                    f"{alone:.0f}",
                    f"{begin:.0f}",
                    f"{(begin - alone) / 2:.0f}",
                    f"{now() - begin:+.1f}",
                ]
            )
    print(
        table(
            [
                "start method",
                "parent alone [MB]",
                "with 2 workers [MB]",
                "each worker adds [MB]",
                f"growth over {n:,} fragments [MB]",
            ],
            rows,
        )
    )


def weights(args):
    "An actor of a million parameters."
    make = lambda: torch.nn.Sequential(*(torch.nn.Linear(576, 576) for _ in range(3)))
    actor = make()
    copy = make()
    times = {"publish": [], "fetch": [], "nothing new": []}
    publisher = WeightPublisher([actor])
    subscriber = publisher.subscriber([0])
    subscriber.attach([copy])
    for _ in range(20 * args.repeats):
        with torch.no_grad():
            for p in actor.parameters():
                p.add_(0.1)
        for what, call in (
            ("publish", publisher.publish),
            ("fetch", subscriber.fetch),
            ("nothing new", publisher.publish),
        ):
            start = perf_counter()
            call()
            times[what].append(1e3 * (perf_counter() - start))
    publisher.close()
    n = sum(p.numel() for p in actor.parameters())
    print(table([f"{n:,} parameters", "ms"], [[what, spread(ms)] for what, ms in times.items()]))


def start(args):
    "Time from the request to the first fragment, with two workers."
    rows = []
    for method in ("fork", "spawn"):
        seconds = []
        for _ in range(args.repeats):
            pipe = pipeline("CartPole-v1", 8, 2)
            begin = perf_counter()
            with DataLoader2(
                pipe, reading_service=ProcessReading(2, start_method=method)
            ) as loader:
                next(iter(loader))
                seconds.append(perf_counter() - begin)
        rows.append([method, spread(seconds)])
    print(table(["start method", "first batch after [s]"], rows))


PARTS = dict(
    throughput=throughput,
    division=division,
    torchdata=torchdata,
    transport=transport,
    memory=memory,
    weights=weights,
    start=start,
)


def main():
    args = options_of(
        __doc__, envs=["CartPole-v1", "Pendulum-v1", "HalfCheetah-v5", "Images"], repeats=5
    )
    args.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    args.add_argument("--seconds", type=float, default=2.0, help="length of one run")
    args.add_argument(
        "--fragments", type=int, default=10_000, help="number of fragments for the growth of memory"
    )
    args = begun(args)
    args.envs = [
        Images if env == "Images" else env for env in args.envs if env == "Images" or installed(env)
    ]
    for part in args.only:
        print(f"\n{PARTS[part].__doc__}\n")
        PARTS[part](args)


if __name__ == "__main__":
    main()
