"""Whatever happens in a worker, or to it, or to its parent: it is told at once and in full, and nothing is left behind.

What each harm comes to at each place is the table of `test_fault_matrix.py`, and a death or a silence at any item has laws in
`test_local_crew.py`; here is what only processes can show.
`conftest.py` checks after each test that no process and no segment is left; the bounds are those of the issue, times `slack()` since
the machine may be busy.
"""

import gc
import logging
import os
import re
import signal
import threading
import time
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
import worker_cases
from conftest import started_by
from fault_rows import Silent
from local_crew import Fault, LocalReading, Plan
from toys import Counting, Lively, Plain, Scripted, Shaky
from worker_cases import Cart, descriptors, forked_script, gone, harmful, runs, slack

from rollpipe.agents import REINFORCE
from rollpipe.layers import Critic, GaussianPolicy
from rollpipe.pipes import (
    DataError,
    EnvError,
    EnvStepper,
    FragmentCollector,
    FragmentStacker,
    Lanes,
    Pipe,
    ProcessReading,
    ReplayMemory,
    WorkerError,
    on_policy,
)
from rollpipe.pipes.data.fragment_ops import unstacked
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.pipes.taps import EpisodeStats


def outcome(pipe, **options):
    "What items of `pipe` in worker processes raise, with the exception's text and that of its cause."
    return worker_cases.outcome(pipe, ProcessReading(**options))


# --- exceptions


class Ends(Pipe):
    "The first stream that is closed raises an exception."

    closed = []

    def __init__(self, pipe, error):
        super().__init__(pipe)
        self.error = error

    def stream(self, items):
        try:
            yield from items
        finally:
            self.closed.append(self)
            if len(self.closed) == 1:
                raise self.error("enough")


@pytest.mark.parametrize("raised", [SystemExit, Silent])
def test_what_one_lane_raises_at_its_end_does_not_keep_the_others_open(raised, caplog):
    "Also if it is no `Exception`. To call `sys.exit` there does not end the learner's program."
    Ends.closed.clear()
    pipe = Lanes(Ends(FragmentCollector(EnvStepper(Counting, Plain()), 2), raised), 3)
    error = None
    try:
        worker_cases.outcome(pipe, LocalReading(1))
    except BaseException as e:
        error = e
    assert len(Ends.closed) == 3
    if raised is Silent:
        assert type(error) is Silent and "in stream" in str(error.__cause__)
    else:
        told = r"(?s)in worker 0, lane 0, Ends:\n.* in stream\n.*SystemExit: enough"
        assert error is None and re.search(told, caplog.text)


def test_after_a_fault_the_loader_is_shut_down_and_the_pipe_can_be_used_again():
    pipe = harmful("raise", "step", 7)
    with DataLoader2(pipe, reading_service=LocalReading(2)) as loader:
        with pytest.raises(EnvError):
            for _ in loader:
                pass
        with pytest.raises(RuntimeError):
            next(iter(loader))
    assert len(list(islice(pipe, 6))) == 6  # here is no worker 1


# --- death


def test_a_worker_that_is_told_to_end_by_others_closes_its_environments(tmp_path):
    "SIGTERM; the parent learns of it all the same."

    env = partial(Scripted, before={"close": lambda env: (tmp_path / str(os.getpid())).touch()})
    with DataLoader2(
        Lanes(FragmentCollector(EnvStepper(env, Plain()), 4), 2, 0),
        reading_service=ProcessReading(2),
    ) as loader:
        items = iter(loader)
        next(items)
        pid = loader.reading_service.health()[1]["pid"]
        next(items)
        os.kill(pid, signal.SIGTERM)
        with pytest.raises(WorkerError, match="lane 1: worker 1 .*ended with exit code 0"):
            for _ in items:
                pass
    assert (tmp_path / str(pid)).exists()


def test_a_death_between_iterations_or_at_the_end_does_no_harm():
    loader = DataLoader2(harmful("raise", "step", 10**9), reading_service=ProcessReading(2))
    next(iter(loader))
    for state in loader.reading_service.health():
        os.kill(state["pid"], signal.SIGKILL)
    start = time.monotonic()
    loader.shutdown()
    assert time.monotonic() - start < 1 * slack()


def test_a_worker_with_processes_of_its_own_is_killed():
    "Its environments' processes have inherited what it held; the parent learns of the death all the same, and they end."
    pipe = Lanes(FragmentCollector(EnvStepper("CartPole-v1", Cart(), 2, vector="async"), 3), 1, 0)

    def begin(loader):
        items = iter(loader)
        next(items)
        pid = loader.reading_service.health()[0]["pid"]
        children = started_by(pid)
        assert len(children) == 2
        return items, pid, children

    with DataLoader2(pipe, reading_service=ProcessReading(1)) as loader:
        _, _, children = begin(loader)
    assert gone(children, 5) == []
    with DataLoader2(pipe, reading_service=ProcessReading(1)) as loader:
        items, pid, children = begin(loader)
        os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(WorkerError, match="worker 0 .*SIGKILL"):
            next(items)
        assert time.monotonic() - start < 1 * slack()
    assert gone(children, 5) == []


# --- silence


def test_a_worker_that_waits_for_a_lock_of_another_thread_is_reported_with_the_thread():
    "It was forked while the thread held the lock, and nobody will ever release the worker's copy."
    lock = threading.Lock()
    held = threading.Event()
    done = threading.Event()

    def holds():
        with lock:
            held.set()
            done.wait()

    def step(env):
        with lock:
            pass

    thread = threading.Thread(target=holds, name="a user's thread")
    thread.start()
    held.wait()
    pipe = Lanes(
        FragmentCollector(EnvStepper(lambda: Scripted(before={"step": step}), Plain()), 2), 1, 0
    )
    reading = ProcessReading(1, silence=0.5, on_silence="raise", grace=0.2, start_method="fork")
    told = r"(?s)silent.*in step\n.*forked beside other threads \(.*a user's thread.*start_method='spawn'"
    try:
        with (
            pytest.raises(WorkerError, match=told),
            DataLoader2(pipe, reading_service=reading) as loader,
        ):
            next(iter(loader))
    finally:
        done.set()
        thread.join()


# --- the parent

LIVES = """
import os, signal, sys, time
from itertools import islice
from worker_cases import harmful
from rollpipe.pipes import ProcessReading
from rollpipe.pipes.graph.torchdata import DataLoader2
if __name__ == '__main__':
    method, doing = sys.argv[1:]
    harm = ('hang', 'step', 30) if doing == 'waits' else ('raise', 'step', 10 ** 9)
    try:
        with DataLoader2(harmful(*harm), reading_service=ProcessReading(2, lag=1, start_method=method, grace=0.5)) as loader:
            for k, _ in enumerate(loader):
                if k == 4: print(*[state['pid'] for state in loader.reading_service.health()], flush=True)
                if k > 4 and doing == 'computes': time.sleep(100)
                if k > 4 and doing == 'runs': time.sleep(0.01)
    except KeyboardInterrupt:
        print('interrupted', flush=True)
        sys.exit(7)
"""


@pytest.mark.parametrize("doing", ["waits", "runs"])
def test_ctrl_c(doing, tmp_path):
    "SIGINT to the whole group, as a terminal sends it: the parent's own business; no worker complains, none is left."
    parent = forked_script(tmp_path, LIVES, "fork", doing)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    time.sleep(0.3)
    os.killpg(parent.pid, signal.SIGINT)
    out, err = parent.communicate(timeout=60)
    assert (parent.returncode, out) == (7, "interrupted\n"), err
    assert err == "" and len(pids) == 2 and gone(pids, 2 * slack()) == []


# --- memory


def test_too_much_to_share():
    "A clear error before the system ends a process for want of memory."

    class Huge(Plain):
        def complete(self, act, info):
            return info | {"huge": torch.zeros(1, dtype=torch.uint8).expand(*act.shape, 2**45)}

    pipe = Lanes(FragmentCollector(EnvStepper(Counting, Huge()), 2), 2, 0)
    error, text, cause = worker_cases.outcome(pipe, LocalReading(2))
    assert type(error) is DataError and re.search(
        r"lane 0: not enough memory to share.*expected [\d,]+ more bytes", text, re.I
    ), text
    assert "worker 0, lane 0" in cause


def test_a_limit_of_the_size_of_files(tmp_path):
    process = forked_script(
        tmp_path,
        """
import resource
from worker_cases import *
from rollpipe.pipes import ProcessReading
pipe = Lanes(FragmentCollector(EnvStepper(lambda: Images(), Dim(), 8), 2000), 2, 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (2 ** 20, 2 ** 20))
try:
    with DataLoader2(pipe, reading_service=ProcessReading(2)) as loader: next(iter(loader))
except Exception as e: print(type(e).__name__, e)
""",
    )
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0 and out.startswith(
        "DataError lane 0: not enough memory to share between processes."
    ), (out, err)
    assert "File too large" in out


# --- restart


def test_a_learner_says_which_lanes_began_anew():
    "A metric says it from the first batch on that has data of such a lane; a memory takes them all; a joined batch can be taken apart."
    actor = GaussianPolicy.for_env(Lively(), hidden=(4,), seed=0)
    critic = Critic.for_env(Lively(), seed=0)
    agent = REINFORCE(actor, seed=0)
    pipe = on_policy(Lively, actor, critic, n_envs=2, n_steps=6, lanes=3, seed=0)
    deaths = [Fault("dies before", worker, item) for worker, item in ((1, 2), (1, 2), (2, 4))]
    with DataLoader2(pipe, reading_service=LocalReading(3, restart=3, plan=Plan(deaths))) as loader:
        batches = list(islice(loader, 6))
    assert [agent.update(x).get("lane_restarts") for x in batches] == [None, None, 1, 1, 3, 3]
    assert batches[1].restarts is None
    assert [b.restarts.tolist() for b in batches[3::2]] == [[0, 0, 1, 1, 0, 0], [0, 0, 2, 2, 1, 1]]
    assert [f.restarts.tolist() for f in unstacked(batches[-1])] == [[0, 0], [2, 2], [1, 1]]
    memory = ReplayMemory(1000, seed=0)
    for batch in batches:
        memory.add(batch)
    assert len(memory) == 6 * 36 and memory.sample(4).fragment.restarts is None


@pytest.mark.parametrize("lag", [0, 1, None])
def test_episodes_do_not_mix_after_a_restart(lag):
    "Returns of episodes come from whole episodes: of 5 steps at a reward of 1 each."
    ends = []
    lanes = harmful("raise", "step", 10**9, lanes=2, n_steps=3)
    pipe = EpisodeStats(FragmentStacker(lanes, 2), ends.append)
    deaths = [Fault("dies after", worker, item) for worker, item in ((1, 5), (1, 6), (0, 16))]
    service = LocalReading(2, lag=lag, restart=3, plan=Plan(deaths))
    with DataLoader2(pipe, reading_service=service) as loader:
        assert len(list(islice(loader, 40))) == 40
        assert loader.reading_service.health()[0]["restarted"] == 3
    assert len(ends) > 30 and {(e.ret, e.length) for e in ends} == {(5.0, 5)}


# --- nothing is left


@pytest.mark.slow
def test_nothing_is_left_open():
    "Descriptors, after loaders that ended well, were broken off, failed or lost a worker."

    def all_ends():
        for case in (
            ("raise", "step", 10**9),
            ("raise", "step", 7),
            ("SIGKILL", "step", 7),
            ("unpicklable", "pipe", 2),
        ):
            outcome(harmful(*case), num_workers=2)
        with DataLoader2(
            harmful("raise", "pipe", 10**9), reading_service=ProcessReading(2, lag=None)
        ) as loader:
            next(iter(loader))
        outcome(harmful("SIGKILL", "step", 7), num_workers=2, restart=2)
        with pytest.raises(WorkerError, match="cannot be sent"):
            outcome_of_start()
        gc.collect()

    all_ends()
    before = descriptors()
    all_ends()
    all_ends()
    assert descriptors() <= before


def outcome_of_start():
    "A worker that cannot be started."
    actor = Shaky()
    actor.stream = (x for x in ())
    pipe = Lanes(FragmentCollector(EnvStepper(Lively, actor), 4), 2, 0)
    next(iter(DataLoader2(pipe, reading_service=ProcessReading(2, start_method="spawn"))))


# --- signals at bad moments


def test_a_death_while_paused():
    with DataLoader2(
        harmful("raise", "step", 10**9), reading_service=ProcessReading(2, lag=None)
    ) as loader:
        items = iter(loader)
        items.limit(2)
        assert len(list(items)) == 2
        os.kill(loader.reading_service.health()[0]["pid"], signal.SIGKILL)
        items.resume()
        with pytest.raises(WorkerError, match="worker 0 .*SIGKILL"):
            for _ in range(20):
                for _ in items:
                    pass
                items.resume()


@pytest.mark.slow
def test_a_worker_killed_while_it_writes_a_long_message_or_a_slot():
    "At any moment: with fragments that consist of much, workers are killed at random times."
    rng = np.random.default_rng(0)

    class Wordy(Plain):
        def complete(self, act, info):
            return info | {f"name {k}": act.clone() for k in range(200)}

    pipe = Lanes(FragmentCollector(EnvStepper(Counting, Wordy()), 3), 2, 0)
    for _ in range(6):
        with DataLoader2(pipe, reading_service=ProcessReading(2, lag=None)) as loader:
            items = iter(loader)
            next(items)
            time.sleep(rng.uniform(0, 0.02))
            os.kill(loader.reading_service.health()[1]["pid"], signal.SIGKILL)
            with pytest.raises(WorkerError, match="worker 1 .*SIGKILL"):
                for _ in items:
                    pass


@pytest.mark.slow
def test_a_worker_that_does_not_start_is_reported(caplog, monkeypatch):
    "After a time of its own. The question where it is would kill it before it can understand, so it is not asked."
    monkeypatch.setattr("rollpipe.pipes.workers.process.STARTING", 0.1)
    with caplog.at_level(logging.WARNING, "rollpipe"):
        pipe = Lanes(FragmentCollector(EnvStepper(Counting, Plain()), 2), 1, 0)
        with DataLoader2(
            pipe, reading_service=ProcessReading(1, silence=0.1, start_method="spawn")
        ) as loader:
            assert next(iter(loader))
    assert re.search(
        r"worker 0 .* has been silent for 0 s; it is here:\n\(it is still being started\)",
        caplog.records[0].getMessage(),
    )


class Long:
    "Gives items that are sent as one long message."

    def __call__(self, fragment):
        return fragment.seq.tolist(), bytes(10**7)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_worker_that_is_stopped_in_the_middle_of_a_message(goes_on, caplog):
    "The parent does not wait for the rest of the message, but reports the worker; if it goes on, the item is whole."
    pipe = Lanes(FragmentCollector(EnvStepper(Counting, Plain()), 2).map(Long()), 1, 0)
    with DataLoader2(
        pipe, reading_service=ProcessReading(1, lag=1, silence=0.5, on_silence="warn", grace=0.2)
    ) as loader:
        items = iter(loader)
        next(items)
        coordinator = loader.reading_service.seams[0].coordinator
        member, wakes = (
            coordinator.members[0],
            lambda *_: os.kill(member.process.pid, signal.SIGCONT),
        )
        while not member.process.poll(0.1):
            pass  # it writes a message that is longer than the connection holds
        time.sleep(0.2)
        os.kill(member.process.pid, signal.SIGSTOP)
        if goes_on:
            before = signal.signal(signal.SIGALRM, wakes)
            signal.setitimer(signal.ITIMER_REAL, 1.5)
            try:
                found = [next(items), next(items)]
            finally:
                signal.signal(signal.SIGALRM, before)
            assert [(seq, len(data)) for seq, data in found] == [([1], 10**7), ([2], 10**7)]
            assert "worker 0" in caplog.text and "has been silent" in caplog.text
        else:
            loader.reading_service.on_silence = "raise"
            with pytest.raises(
                WorkerError, match=r"(?s)lane 0: worker 0 .*silent .*here:\n\(no answer\)"
            ):
                for _ in items:
                    pass


def test_a_worker_that_does_not_leave_is_killed():
    "One that ignores every request to end, after the grace."

    class Deaf(Counting):
        def step(self, action):
            if self.episode:
                block()
            return super().step(action)

    with DataLoader2(
        Lanes(FragmentCollector(EnvStepper(lambda: Deaf([(2, "term")]), Plain()), 2), 1, 0),
        reading_service=ProcessReading(1, lag=1, grace=0.3),
    ) as loader:
        next(iter(loader))
        pid = loader.reading_service.health()[0]["pid"]
    assert not runs(pid)


def block():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    while True:
        time.sleep(60)


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    "method, doing", [("fork", "computes"), pytest.param("spawn", "runs", marks=pytest.mark.slow)]
)
def test_the_parent_is_killed(method, doing, tmp_path):
    "Idle and busy workers end within two seconds. `test_guard.py` has those that hang in C or are stopped."
    parent = forked_script(tmp_path, LIVES, method, doing)
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
    finally:
        os.kill(parent.pid, signal.SIGKILL)
    assert len(pids) == 2, parent.communicate()
    assert gone(pids, 2 * slack()) == []
    parent.communicate()


def test_ctrl_c_in_this_process():
    with pytest.raises(KeyboardInterrupt):
        with DataLoader2(
            harmful("hang", "step", 9), reading_service=ProcessReading(2, lag=1, grace=0.5)
        ) as loader:
            signal.setitimer(signal.ITIMER_REAL, 1)
            before = signal.signal(signal.SIGALRM, signal.default_int_handler)
            try:
                for _ in loader:
                    pass
            finally:
                signal.signal(signal.SIGALRM, before)
