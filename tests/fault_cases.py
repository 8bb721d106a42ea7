"One pipeline in which anything can go wrong anywhere, what may be done to it, and what is left behind; for `test_fault_matrix.py`."

import gc
import itertools
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from multiprocessing import current_process, resource_tracker

import gymnasium as gym
import numpy as np
import torch
from conftest import _children as children
from conftest import _segments as segments
from gymnasium.spaces import Box, Dict, Discrete
from local_crew import LocalReading
from worker_cases import descriptors

from rollpipe.agents.learner import check_batch
from rollpipe.layers import Actor
from rollpipe.pipes import (
    AdvantageBuffer,
    EnvStepper,
    FragmentCollector,
    Lanes,
    Pipe,
    ProcessReading,
)
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.pipes.taps import Tap

# --- the pipeline

# of faults; of the calls in this process. An actor's own attributes must not change
NUMBERS = itertools.count()
CALLS = Counter()


class Fault:
    """Does `harm` at call number `at` of `place`, or at every call (None), in `process`; with a path `once`, only one process ever does it.

    Everything that can be harmed calls it with the name of the place and with what it is about to answer, and answers what it gets back.
    """

    def __init__(self, harm, place, at=1, process="MainProcess", once=None):
        self.harm = harm
        self.place = place
        self.at = at
        self.process = process
        self.once = once
        self.number = next(NUMBERS)

    def __call__(self, place, value=None):
        if place != self.place or current_process().name != self.process:
            return value
        CALLS[self.number] += 1
        if self.at not in (None, CALLS[self.number]) or self.once and not self.is_first():
            return value
        return self.harm(value)

    def is_first(self):
        try:
            os.close(os.open(self.once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


OBS = Dict(place=Box(-np.inf, np.inf, (3,)), gear=Discrete(4), level=Box(-100, 100, (), np.int16))
ACT = Dict(push=Box(-1, 1, (2,)), gear=Discrete(3))


class Touchy(gym.Env):
    "Episodes of 5 steps, which are cut off."

    observation_space, action_space = OBS, ACT
    n_open = 0  # in this process

    def __init__(self, fault):
        self.fault = fault
        fault("factory")
        Touchy.n_open += 1

    def look(self):
        return {
            "place": np.full(3, self.count, np.float32),
            "gear": self.count % 4,
            "level": np.int16(self.count),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.fault("reset", (self.look(), {}))

    def step(self, action):
        assert ACT.contains(action), action
        self.count += 1
        return self.fault("step", (self.look(), 1.0, False, self.count == 5, {"count": self.count}))

    def close(self):
        Touchy.n_open -= 1
        self.fault("close")


class TouchyVector(gym.vector.SyncVectorEnv):
    "Two `Touchy` environments in one vector environment."

    def __init__(self, fault):
        self.fault = fault
        fault("vector factory")
        super().__init__([lambda: Touchy(nothing)] * 2)

    def reset(self, **kwargs):
        return self.fault("vector reset", super().reset(**kwargs))

    def step(self, actions):
        return self.fault("vector step", super().step(actions))

    def close_extras(self, **kwargs):
        super().close_extras(**kwargs)
        self.fault("vector close")


def nothing(place, value=None):
    return value


class TouchyActor(Actor):
    "Remembers how many steps it has seen; reports that number."

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, obs, act, rew, fin, *, hx, stepno, virtual):
        n = torch.zeros(1, fin.shape[1]) if hx is None else hx[0] + 1
        act = {
            "push": torch.zeros(*fin.shape, 2) + self.weight,
            "gear": torch.zeros(fin.shape, dtype=torch.int64),
        }
        answer = act, (n,), {"seen": n}
        return answer if virtual else self.fault("actor", answer)

    def reset(self, hx, at):
        return self.fault("actor reset", super().reset(hx, at))

    def complete(self, act, info):
        return self.fault("actor complete", {**info, "logp": torch.zeros(act["gear"].shape)})

    def __reduce__(self):
        return self.fault("pickling", (restored, (type(self), self.fault)))


def restored(cls, fault):
    "What a pickled actor becomes in a worker."
    fault("unpickling")
    return cls(fault)


class TouchyCritic(torch.nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def forward(self, obs):
        return self.fault("critic", obs["place"][..., 0] * 0)


class Passes(Pipe):
    "Passes items on; it can be harmed with each item, and when it is closed."

    def __init__(self, pipe, fault, name):
        super().__init__(pipe)
        self.fault, self.name = fault, name

    def stream(self, items):
        try:
            for item in items:
                yield self.fault(self.name, item)
        finally:
            self.fault(f"end of {self.name}")


def pipeline(fault):
    "Two lanes of two environments; the second environment of each lane can be harmed."

    def touchy():
        return Touchy(fault)

    def vector():
        return TouchyVector(fault)

    source = vector if fault.place.startswith("vector") else [partial(Touchy, nothing), touchy]
    pipe = Passes(FragmentCollector(EnvStepper(source, TouchyActor(fault)), 4), fault, "pipe above")
    pipe = AdvantageBuffer(Lanes(pipe, 2, seed=0), TouchyCritic(fault))
    return Passes(Tap(pipe, partial(fault, "tap")), fault, "pipe below")


IN_PARENT = "critic", "tap", "pipe below", "end of pipe below", "loop", "pickling"


# --- a run


@dataclass
class Found:
    "What became of a run: the items, the error, the lines of the log with the warnings, the seconds; lane -> how often it began anew."

    items: int = 0
    restarts: dict = field(default_factory=dict)  # as the newest fragments say that do
    error: BaseException | None = None
    log: list = field(default_factory=list)
    seconds: float = 0.0

    @property
    def text(self):
        try:
            return "" if self.error is None else str(self.error)
        except Exception:
            return ""  # an exception of the user without a text


class Keeps(logging.Handler):
    "Keeps the messages that this thread logs."

    def __init__(self, into):
        super().__init__()
        self.into = into
        self.thread = threading.get_ident()

    def emit(self, record):
        self.into.extend([record.getMessage()] if record.thread == self.thread else ())


@contextmanager
def logged(into):
    "Append what is logged, and what is warned in the main thread, to the list `into`."
    handler = Keeps(into)
    logger = logging.getLogger("rollpipe")
    logger.addHandler(handler)
    try:
        if threading.current_thread() is not threading.main_thread():
            yield
        else:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                warnings.filterwarnings(
                    "ignore", "This process .* is multi-threaded", DeprecationWarning
                )  # see pyproject.toml
                try:
                    yield
                finally:
                    into += [str(x.message) for x in caught]
    finally:
        logger.removeHandler(handler)


@contextmanager
def unraisable(into):
    "Append to the list `into` what is raised where nobody can catch it, such as by a generator that is collected."

    def told(x):
        if threading.current_thread() is thread:
            into.append(f"ignored: {type(x.exc_value).__name__}: {x.exc_value}")
        else:
            before(x)

    thread = threading.current_thread()
    before = sys.unraisablehook
    sys.unraisablehook = told
    try:
        yield
    finally:
        sys.unraisablehook = before


class Hangs(BaseException):
    "The run did not come to an end."


@contextmanager
def limited(seconds):
    "Raise `Hangs` after some time, in the main thread. The timer of others goes on afterwards."
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_):
        raise Hangs(f"after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    left = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *left)
        signal.signal(signal.SIGALRM, before)


def run(harm, place, method=None, lag=0, at=1, n=6, limit=60.0, once=False, **options) -> Found:
    "Take `n` batches from the pipeline, check them as learners do, in this process (`method=None`) or by workers, and shut down."
    n_workers = {None: 0, "local": 2, "fork": 2}.get(method, 1)  # others take long to start
    process = "MainProcess" if method is None or place in IN_PARENT else f"worker {n_workers - 1}"
    found = Found()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, logged(found.log), unraisable(found.log):
        fault = Fault(harm, place, at, process, os.path.join(folder, "done") if once else None)
        if method is None:
            service = None
        elif method == "local":
            service = LocalReading(n_workers, lag, **options)
        else:
            options = {"grace": 2.0, **options}
            service = ProcessReading(n_workers, lag, start_method=method, **options)
        try:
            with limited(limit), DataLoader2(pipeline(fault), reading_service=service) as loader:
                for batch in islice(loader, n):
                    fault("loop")
                    if found.items == 0 and "on_silence" in options:
                        become_impatient(loader.reading_service)
                    check_batch(batch, ("adv", "ret", "logp"), "Learner")
                    if batch.restarts is not None:
                        found.restarts.update(zip(batch.lane.tolist(), batch.restarts.tolist()))
                    found.items += 1
        except BaseException as e:
            found.error = e.with_traceback(None)  # frames would keep the loader alive
        gc.collect()
    found.seconds = time.monotonic() - start
    return found


# --- what is left


def become_impatient(service, silence=0.5):
    "From now on a worker may be silent for half a second; before, it may still be starting."
    service.silence = silence
    for member in service.seams[0].coordinator.members:
        member.patience = silence


class Left:
    "Processes, descriptors, threads, open environments and shared memory of this process; `more()` are those that were not there before."

    def __init__(self):
        resource_tracker.ensure_running()  # it lives as long as the interpreter
        self.before = self.look()

    def look(self):
        gc.collect()
        return dict(
            processes=children(),
            descriptors=descriptors(),
            threads=threading.active_count(),
            environments=Touchy.n_open,
            segments=segments({os.getpid()}),
        )

    def more(self, within=5.0) -> dict:
        "name -> what is left; it waits a moment for what is about to go."
        deadline = time.monotonic() + within
        while True:
            now = self.look()
            more = {k: x - self.before[k] for k, x in now.items()}
            left = {k: x for k, x in more.items() if (x if isinstance(x, set) else x > 0)}
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.02)
