"""Whatever its workers do, a process that is killed leaves none of them behind, and a thread that ends takes none with it."""

import multiprocessing
import os
import signal
import subprocess
import time
import warnings
from itertools import islice
from pathlib import Path
from threading import Event, Thread

import pytest
from conftest import command_of, started_by
from toys import Counting, Plain
from worker_cases import forked_script, gone, harmful, runs, slack

from rollpipe.pipes import EnvError, EnvStepper, FragmentCollector, Lanes, ProcessReading
from rollpipe.pipes.cluster.door import descendants
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.pipes.workers import entry as guard_module
from rollpipe.pipes.workers.process import WorkerProcess

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="there is no guard without pidfd_open"
)

LIVES = """
import os, sys
from multiprocessing import current_process
from pathlib import Path
from worker_cases import Harmful, Lively, Shaky
from rollpipe.pipes import EnvStepper, FragmentCollector, Lanes, ProcessReading
from rollpipe.pipes.graph.torchdata import DataLoader2

class Tells(Harmful):
    "Notes that it was closed, as one does that has a simulator to end."
    def close(self): Path(sys.argv[2], current_process().name + ' has closed').touch()

if __name__ == '__main__':
    method = sys.argv[1]
    pipe = Lanes(FragmentCollector(EnvStepper(lambda: Tells('hold', 'step', 30), Shaky()), 4), 3, 0)
    with DataLoader2(pipe, reading_service=ProcessReading(3, lag=1, start_method=method)) as loader:
        for k, _ in enumerate(loader):
            if k == 6: print(*[state['pid'] for state in loader.reading_service.health()], flush=True)
"""


def guards(pid=None):
    "Numbers of the guards of a process."
    return [
        p
        for p in sorted(started_by(pid or os.getpid()))
        if b"rollpipe guard" in command_of(p) and runs(p)
    ]


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_the_parent_is_killed(method, tmp_path, monkeypatch):
    "One worker waits, one is in C code that holds the interpreter's lock, one is stopped: all end, and close environments if they can."
    monkeypatch.setenv("HARM", str(tmp_path / "holds"))
    parent = forked_script(tmp_path, LIVES, method, tmp_path)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    try:
        assert len(pids) == 3, parent.communicate()
        deadline = time.monotonic() + 60
        while not (tmp_path / "holds").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.2)
        os.kill(pids[2], signal.SIGSTOP)
        pids += guards(parent.pid)
        assert len(pids) == 4 and all(map(runs, pids))
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        left = gone(pids, 4 * slack())
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert left == []
    assert {p.name for p in tmp_path.glob("*closed")} == {
        "worker 0 has closed",
        "worker 2 has closed",
    }
    parent.communicate()


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_the_thread_that_started_a_worker_ends(method):
    "The worker goes on: a death signal of the kernel, for example, would have come."
    pipe = Lanes(FragmentCollector(EnvStepper(Counting, Plain()), 2), 1, 0)
    with DataLoader2(pipe, reading_service=ProcessReading(1, start_method=method)) as loader:
        items = iter(loader)
        thread = Thread(target=lambda: next(items))
        thread.start()
        thread.join()
        (pid,) = [state["pid"] for state in loader.reading_service.health()]
        assert gone([pid], 1) == [pid]
        assert [f.seq.tolist() for f in islice(items, 3)] == [[1], [2], [3]]


def workers(n=2, **options):
    return DataLoader2(
        harmful("raise", "step", 10**9), reading_service=ProcessReading(n, **options)
    )


def test_one_guard_serves_all_loaders_and_a_guard_that_was_killed_is_replaced():
    with workers() as loader, workers() as other:
        next(iter(loader)), next(iter(other))
        (first,) = guards()
        os.kill(first, signal.SIGKILL)
        assert gone([first], 5) == []
        with workers() as third:
            next(iter(third))
            (second,) = guards()
            assert second != first


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_the_guard_ends_with_the_last_worker_and_comes_again_with_the_next(method):
    found = []
    for _ in range(2):
        with workers(start_method=method) as loader:
            next(iter(loader))
            with workers(1) as other:
                next(iter(other))
                found += guards()
            assert (
                guards() == found[-1:]
            )  # the workers of one loader have ended, those of the other have not
        assert (
            guards() == [] and not Path(f"/proc/{found[-1]}").exists()
        )  # nor is it left as a zombie
    assert len(set(found)) == 2


def test_the_guard_ends_when_a_worker_has_failed():
    with DataLoader2(harmful("raise", "step", 3), reading_service=ProcessReading(2)) as loader:
        with pytest.raises(EnvError):
            list(islice(loader, 9))
        assert guards() == []


def test_workers_of_many_threads_begin_and_end_at_once():
    "Whoever has workers has a guard, and when none has any there is none."

    def work(k):
        for _ in range(4):
            worker = WorkerProcess(
                f"worker {k}", greet, start_method="forkserver"
            )  # quick, and safe beside threads
            assert worker.receive() == "hello"
            known = guard_module._guards[os.getpid()]
            assert worker.pid in known.workers and runs(known.pid)
            assert worker.close() is None
            done.append(k)

    done = []
    threads = [Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 12 and guards() == [] and guard_module._guards == {}


def test_a_process_that_is_forked_meanwhile_can_start_workers_of_its_own():
    "Another thread starts and ends guards. If it held the lock in the new process, that would wait for ever."

    def change():
        while not stop.is_set():
            guard_and_unguard()

    stop = Event()
    thread = Thread(target=change)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has several threads
        thread.start()
        try:
            for _ in range(10):
                child = multiprocessing.get_context("fork").Process(target=guard_and_unguard)
                child.start()
                child.join(30)
                assert child.exitcode == 0
        finally:
            stop.set(), thread.join()
    assert guards() == []


def guard_and_unguard():
    with subprocess.Popen(["sleep", "60"]) as process:
        guard_module.guard(process.pid)
        assert len(guards()) == 1
        process.kill(), process.wait()
        guard_module.unguard([process.pid])
    assert guards() == []


def test_signals_for_the_parent_do_not_end_the_guard():
    "A scheduler or a terminal sends them to all processes; the parent may need time to save its work."
    with DataLoader2(harmful("raise", "step", 10**9), reading_service=ProcessReading(1)) as loader:
        next(iter(loader))
        (pid,) = guards()
        while os.getpgid(pid) == os.getpgid(0):
            time.sleep(0.01)  # it is still starting
        time.sleep(0.2)
        for sign in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            os.kill(pid, sign)
        assert gone([pid], 0.5) == [pid]


@pytest.mark.slow
def test_the_child_of_a_thread_that_ends_is_found_all_the_same():
    "Ray's processes are guarded by this list. The system gives such a child to another thread, while the lists of threads are read."

    def start():
        children.append(subprocess.Popen(["sleep", "60"]))
        begun.set()
        gate.wait()

    for _ in range(500):
        children = []
        begun = Event()
        gate = Event()
        thread = Thread(target=start)
        thread.start()
        begun.wait()
        gate.set()
        try:
            lists = [descendants(os.getpid()) for _ in range(3)] + [started_by(os.getpid())]
        finally:
            thread.join()
            for child in children:
                child.kill()
                child.wait()
        assert all(children[0].pid in found for found in lists)


def test_without_descriptors_of_processes(monkeypatch):
    "As on other systems, or with an old kernel: workers run, and nothing is guarded."

    def old(pid):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(guard_module, "_guards", {})
    before = guards()
    for patch in (
        lambda: monkeypatch.setattr(os, "pidfd_open", old),
        lambda: monkeypatch.delattr(os, "pidfd_open"),
    ):
        patch()
        worker = WorkerProcess("worker", greet, start_method="fork")
        assert worker.receive() == "hello" and worker.close() is None
    assert guards() == before and guard_module._guards == {}


def test_a_guard_that_cannot_be_started(monkeypatch, caplog):
    "It is told, and the worker runs all the same."
    monkeypatch.setattr(guard_module, "_guards", {})  # as in a new process
    monkeypatch.setattr(
        guard_module.multiprocessing.spawn, "get_executable", lambda: "/nowhere/python"
    )
    worker = WorkerProcess("worker", greet, start_method="fork")
    assert worker.receive() == "hello" and worker.close() is None
    assert "there is no guard" in caplog.text and "/nowhere/python" in caplog.text


def greet(link):
    link.send("hello")
