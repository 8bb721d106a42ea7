"""Crews without processes: workers are objects of this process, time is a number, and faults happen on order.

`LocalReading` takes the place of `ProcessReading`, and `LocalRayReading` that of `RayReading`. Coordinator, schedule, memory, weights and
the loop over the lanes are those of the package; the graphs of a worker are copied by pickle, as for a spawned one. A worker collects only
while the coordinator waits, and never by itself, so every run is the same.
"""

import faulthandler
import pickle
import signal
from collections import deque
from contextlib import contextmanager
from math import inf
from multiprocessing import current_process
from random import Random
from types import SimpleNamespace
from typing import NamedTuple

import cloudpickle
import torch

from rollpipe.pipes import ProcessReading, RayReading
from rollpipe.pipes.cluster.ray_crew import RayCrew
from rollpipe.pipes.graph import modules
from rollpipe.pipes.keeping.random_states import GlobalRandomStates
from rollpipe.pipes.workers import coordinator, crew
from rollpipe.pipes.workers.channel import send_exception
from rollpipe.pipes.workers.crew import Member, Members, ProcessCrew, pickled_for
from rollpipe.pipes.workers.entry import STARTED, STATE, LaneRunner
from rollpipe.pipes.workers.process import WorkerProcess, _death_of, _drain

FIRST_PID = 2**30  # no process of this machine has such a number


class Fault(NamedTuple):
    """What happens once to a worker.

    Args:
        kind: "dies before" or "dies after" it has collected the item, "dies unseen" (its connection stays open), "dies at its start",
            "is silent", or, in a cluster, "loses" the item on its way
        worker: number of the worker
        item: number of the item among those that the worker has collected since it was started
        until: time of the clock from which a silent worker goes on [s]
    """

    kind: str
    worker: int = 0
    item: int = 0
    until: float = inf


class Clock:
    "Takes the place of the module `time`. A look at the members takes `step` seconds, and longer if nothing happens."

    def __init__(self, step=0.01):
        self.now = 0.0
        self.step = step

    def monotonic(self):
        return self.now

    def install(self, monkeypatch):
        for module in (coordinator, crew):
            monkeypatch.setattr(module, "time", self)
        return self


PLANS = []  # a loader copies its service by pickle, but not the plan


def plan_numbered(number):
    return PLANS[number]


class Plan:
    """The faults that are still to happen to the workers of a service, and who is quick.

    Args:
        faults: a `Fault` each; those of a worker come one after the other
        speeds: seed of a random number for each turn of a worker, which says if it works; None: each always does
        clock: a `Clock`, or None
        n_cores: processor cores that the crew believes in
    """

    def __init__(self, faults=(), speeds=None, clock=None, n_cores=4):
        self.number = len(PLANS)
        PLANS.append(self)
        self.faults = list(faults)
        self.random = None if speeds is None else Random(speeds)
        self.clock = clock
        self.n_cores = n_cores
        self.n_started = 0

    def __reduce__(self):
        return plan_numbered, (self.number,)

    def fault_of(self, worker, item):
        "The fault that happens to this worker now. Its kind is empty if there is none."
        own = [fault for fault in self.faults if fault.worker == worker]
        if not own or own[0].item != item:
            return Fault("")
        self.faults.remove(own[0])
        return own[0]

    def is_quick(self):
        return self.random is None or self.random.random() < 0.4

    def next_pid(self):
        self.n_started += 1
        return FIRST_PID + self.n_started

    def pass_time(self, seconds=0.0):
        if self.clock is not None:
            self.clock.now += max(seconds, self.clock.step)

    def is_silent(self, until):
        return until > (0.0 if self.clock is None else self.clock.now)


class Surroundings:
    "What a worker process has of its own: its name, its random numbers, its reactions to signals, and the networks that it has unpickled."

    def __init__(self, name):
        self.name = name
        self.states = GlobalRandomStates()
        self.networks = {}

    @contextmanager
    def entered(self):
        "In this block, this process has them."
        process = current_process()
        name_before = process.name
        networks_before = modules._objects
        reaction_before = signal.getsignal(signal.SIGTERM)
        threads_before = torch.get_num_threads()
        blocks_before = dict(vars(modules._blocks))  # see `torch_threads`
        states_before = GlobalRandomStates()
        process.name = self.name
        modules._objects = self.networks
        self.states.put()
        try:
            yield
        finally:
            self.states.take()
            states_before.put()
            torch.set_num_threads(threads_before)
            vars(modules._blocks).clear()
            vars(modules._blocks).update(blocks_before)
            signal.signal(signal.SIGTERM, reaction_before)
            modules._objects = networks_before
            process.name = name_before


# --- instead of processes


class Messages(deque):
    "The worker's end of a connection: what it sends waits here as pickles."

    def send(self, message):
        self.append(pickle.dumps(message))

    def send_bytes(self, data):
        self.append(data)


class LocalWorker(WorkerProcess):
    """A `WorkerProcess` without a process.

    Args:
        plan: the `Plan`
        index: number of the worker
        slots: the slots for items
        subscriber: a `WeightSubscriber`
        packed: pickle of the other arguments of `LaneRunner` after the name
        grace: as in `WorkerProcess`
    """

    def __init__(self, plan, index, slots, subscriber, packed, grace):
        self.plan = plan
        self.index = index
        self.name = f"worker {index}"
        self.grace = grace
        self.arguments = slots, subscriber, packed
        self.other_threads = []
        self.has_started = self.is_unseen = self.is_closed = False
        self.silent_until = 0.0
        self.requests = deque()
        self.messages = Messages()
        self.surroundings = Surroundings(self.name)
        self.runner = None
        self.n_items = 0

        # What of a process and of its traceback file is looked at.
        self.process = SimpleNamespace(pid=plan.next_pid(), exitcode=None, join=lambda _: None)
        self.process.is_alive = lambda: self.process.exitcode is None
        self.traceback_file = SimpleNamespace(
            is_served=lambda: self.runner is not None, ask=lambda pid, timeout: "(a traceback)"
        )

    def send(self, message):
        self.requests.append(pickle.dumps(message))

    def work(self):
        "Answer the oldest request, or do what the plan says instead."
        plan = self.plan
        is_idle = not self.requests or not self.is_alive() or plan.is_silent(self.silent_until)
        if is_idle or not plan.is_quick():
            return
        request = pickle.loads(self.requests[0])
        is_item = request[0] != STATE
        kind, *_, until = plan.fault_of(self.index, self.n_items) if is_item else Fault("")
        if kind == "is silent":
            self.silent_until = until
            return
        self.requests.popleft()
        if kind == "dies at its start":
            self.process.exitcode = 1
            return
        if kind == "dies unseen":
            self.is_unseen = True
            self.process.exitcode = -signal.SIGKILL
            return

        # Begin, unless the worker is there already.
        with self.surroundings.entered():
            if self.runner is None and not self.begin():
                return
            if kind != "dies before":
                answer = self.answer(request)
        if kind in ("dies before", "dies after"):
            self.process.exitcode = -signal.SIGKILL
        elif answer is not None:
            self.messages.append(answer)
        self.n_items += is_item

    def begin(self):
        "Make the runner. Returns False if it cannot be made, which is told."
        self.messages.send(STARTED)
        slots, subscriber, packed = self.arguments
        try:
            arguments = pickle.loads(packed)
            self.runner = LaneRunner(self.messages, slots, subscriber, self.name, *arguments)
        except BaseException as e:
            send_exception(self.messages, e, self.name)
            self.process.exitcode = 0
        return self.runner is not None

    def answer(self, request):
        "The pickle of the answer, or None after an exception, which ends the worker, as in `run_lanes` and `run_worker`."
        try:
            if request[0] == STATE:
                return pickle.dumps((self.runner.state(request[1]),))
            return pickle.dumps(self.runner.answer(request))
        except SystemExit as e:
            send_exception(self.messages, e, self.name)
            self.process.exitcode = e.code
        except BaseException as e:
            self.runner.send_error(e)
            self.process.exitcode = 0
        self.runner.close()
        return None

    def has_news(self):
        return bool(self.messages) or not (self.is_alive() or self.is_unseen)

    def read(self):
        "The next message as `_drain` reads it, or None."
        return self.messages.popleft() if self.messages else None

    def _read(self):
        if not self.messages and not self.is_alive():
            raise _death_of(self)
        return self.read()

    def end(self):
        "End the worker. Returns the errors that it sent at the end."
        if self.is_closed:
            return []
        self.is_closed = True
        if self.is_alive():
            with self.surroundings.entered():
                if self.runner is not None:
                    self.runner.close()
            self.process.exitcode = 0
        errors = []
        _drain(self, errors)
        return errors

    def close(self):
        return next(iter(self.end()), None)


class LocalMembers(Members):
    "Members that work while somebody waits for them."

    def __init__(self, plan):
        self.plan = plan
        self.members = []
        self.n_cores = plan.n_cores

    def add(self, member):
        self.members[member.index : member.index + 1] = [member]

    def disconnect(self, member):
        pass

    def wait(self, seconds):
        for member in self.members:
            member.process.work()
        ready = [member for member in self.members if member.process.has_news()]
        self.plan.pass_time(0.0 if ready else seconds)
        return ready

    def end(self, failed=False):
        errors = []
        for member in self.members:
            errors += member.process.end()
        return errors


class LocalCrew(ProcessCrew):
    "A `ProcessCrew` of `LocalWorker`."

    def __init__(self, seam, service):
        super().__init__(seam, service)
        self.members = LocalMembers(service.plan)

    def start(self, index, graphs, states, publisher, holders, with_states=False):
        service = self.service
        with pickled_for(None):
            packed = cloudpickle.dumps((graphs, states, None, with_states))
        subscriber = publisher.subscriber(holders)
        worker = LocalWorker(
            service.plan, index, self.pool.slots, subscriber, packed, service.grace
        )
        return Member(index, worker, graphs, worker.patience(service.silence))


class LocalReading(ProcessReading):
    "A `ProcessReading` without processes; `plan` is a `Plan`."

    def __init__(self, *args, plan=None, **kwargs):
        self.plan = plan or Plan()
        super().__init__(*args, **kwargs)

    def crew(self, seam):
        return LocalCrew(seam, self)


# --- instead of Ray


class RayError(Exception):
    "Takes the place of `ray.exceptions.RayError`."


class Answer:
    "Takes the place of an object reference: the answer to a call, or what was put into the store."

    def __init__(self, value=None, is_done=False):
        self.value = value
        self.is_done = is_done
        self.error = None


class LocalActor:
    "An actor of Ray whose calls wait in a line."

    def __init__(self, ray, kind, index):
        self.ray = ray
        self.index = index
        self.object = kind()
        self.calls = deque()
        self.surroundings = Surroundings(f"worker {index}")
        self.pid = ray.plan.next_pid()
        self.silent_until = 0.0
        self.error = None
        self.n_items = 0

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *args, **kwargs: self.call(name, args, kwargs))

    def call(self, name, args, kwargs):
        answer = Answer()
        self.calls.append((answer, name, cloudpickle.dumps(args), cloudpickle.dumps(kwargs)))
        if self.error is not None:
            self.die(self.error)
        return answer

    def die(self, error):
        "All answers that have not come are this error."
        self.error = error
        for answer, *_ in self.calls:
            answer.error = error
            answer.is_done = True
        self.calls.clear()

    def work(self):
        "Answer the oldest call, or do what the plan says instead."
        plan = self.ray.plan
        if not self.calls or plan.is_silent(self.silent_until) or not plan.is_quick():
            return
        answer, name, args, kwargs = self.calls[0]
        args = [self.ray.value_of(x) for x in pickle.loads(args)]
        is_item = name == "answer" and args[2] != STATE
        kind, *_, until = plan.fault_of(self.index, self.n_items) if is_item else Fault("")
        if kind == "is silent":
            self.silent_until = until
        elif kind in ("dies before", "dies unseen"):
            self.die(RayError("Worker exit detail: killed on order"))
        else:
            with self.surroundings.entered():
                value = getattr(self.object, name)(*args)
            if name == "begin":
                faulthandler.unregister(signal.SIGUSR1)
                messages, _, *rest = value
                value = messages, self.pid, *rest
            if kind == "dies after":
                self.die(RayError("Worker exit detail: killed on order"))
                return
            self.calls.popleft()
            answer.value = pickle.loads(pickle.dumps(value))
            answer.error = RayError("killed on order") if kind == "loses" else None
            answer.is_done = True
            self.n_items += is_item


class LocalRay:
    "What a crew uses of the module `ray`, with actors in this process."

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, plan):
        self.plan = plan
        self.actors = []
        self.store = {}  # number of an object -> what was put

    def is_initialized(self):
        return True

    def remote(self, kind):
        def options(index):
            return SimpleNamespace(remote=lambda: self.actor(kind, index))

        return SimpleNamespace(options=options)

    def actor(self, kind, index):
        self.actors.append(LocalActor(self, kind, index))
        return self.actors[-1]

    def put(self, value):
        self.store[len(self.store)] = value
        return Stored(len(self.store) - 1)

    def value_of(self, x):
        return self.store[x.number] if isinstance(x, Stored) else x

    def get(self, answer, timeout=None):
        if answer.error is not None:
            raise answer.error
        return answer.value

    def wait(self, answers, num_returns=1, timeout=None):
        ready = []
        for _ in range(100 if timeout else 1):
            for actor in self.actors:
                actor.work()
            ready = [answer for answer in answers if answer.is_done][:num_returns]
            if len(ready) == num_returns:
                break
        self.plan.pass_time(0.0 if ready else timeout)
        return ready, [answer for answer in answers if answer not in ready]

    def kill(self, actor, no_restart):
        actor.die(RayError("Worker exit detail: it was killed"))
        self.actors.remove(actor)


class Stored(NamedTuple):
    "Takes the place of a reference to what was put into the store."

    number: int


class AnyPlace:
    "Takes the place of a `ClusterPlace`: there is room for all."

    def check_capacity(self, ray, n):
        pass

    def group(self, ray, n):
        pass

    def options(self, ray, group, index):
        return dict(index=index)

    def release(self):
        pass


class LocalRayReading(RayReading):
    "A `RayReading` without Ray; `plan` is a `Plan`."

    def __init__(self, *args, plan=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.plan = plan or Plan()
        self.place = AnyPlace()

    def crew(self, seam):
        return RayCrew(seam, self, LocalRay(self.plan))


CREWS = {"processes": LocalReading, "Ray": LocalRayReading}
