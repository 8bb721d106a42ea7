"""The parent's end of a connection agrees with `multiprocessing`'s own end, however the bytes are cut, and never waits."""

import multiprocessing
import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest
from worker_cases import forked_script, slack

from rollpipe.pipes.workers.crew import Member, Members
from rollpipe.pipes.workers.process import (
    NOTHING,
    STARTING,
    Link,
    WorkerDied,
    WorkerProcess,
    _header,
)


@pytest.fixture
def ends():
    ours, theirs = multiprocessing.Pipe()
    yield Link(ours), theirs
    for end in (ours, theirs):
        end.close()


def test_messages_of_any_size_in_pieces_of_any_size(ends):
    link, theirs = ends
    rng = np.random.default_rng(0)
    for _ in range(20):
        messages = [rng.bytes(rng.integers(0, 3000)) for _ in range(5)]
        data = b"".join(_header(len(m)) + m for m in map(pickle.dumps, messages))
        found = []
        while data:
            n = int(rng.integers(1, 700))
            os.write(theirs.fileno(), data[:n])
            data = data[n:]
            while (message := link.read()) is not None:
                found.append(pickle.loads(message))
        assert found == messages


@pytest.mark.parametrize("size", [0, 1, 16_380, 16_384, 16_390, 10**7])
def test_it_speaks_as_connections_of_multiprocessing_do(ends, size):
    "In both directions; the other end is read and written in a thread, as in another process."
    link, theirs = ends
    data = os.urandom(size)
    received = []

    def echo():
        received.append(theirs.recv()), theirs.send(received[0])

    thread = threading.Thread(target=echo)
    thread.start()
    link.send(data)
    while link.unsent:
        link.poll(1)
    while (message := link.read()) is None:
        link.poll(1)
    thread.join()
    assert received == [data] and pickle.loads(message) == data and link.read() is None


def test_lengths_of_two_gigabytes_and_more_are_those_of_multiprocessing():
    headers = []

    class Long(bytes):
        def __len__(self):
            return 2**31 + 5

    class Records(multiprocessing.connection.Connection):
        "Keeps what it would write before the body."

        def __init__(self):
            pass

        def __del__(self):
            pass

        def _send(self, data, write=None):
            if len(data) < 100:
                headers.append(bytes(data))

    Records()._send_bytes(Long())
    assert b"".join(headers) == _header(2**31 + 5)


def test_a_length_of_eight_bytes_is_read(ends):
    link, theirs = ends
    message = pickle.dumps("long")
    os.write(theirs.fileno(), b"\xff\xff\xff\xff" + len(message).to_bytes(8, "big")[:3])
    assert link.read() is None
    os.write(theirs.fileno(), len(message).to_bytes(8, "big")[3:] + message)
    assert pickle.loads(link.read()) == "long"


@pytest.mark.parametrize("sent", [0, 3, 10])
def test_the_end_of_the_connection(ends, sent):
    "Between messages, or in the middle of one."
    link, theirs = ends
    os.write(theirs.fileno(), (_header(100) + bytes(100))[:sent])
    theirs.close()
    assert link.poll()
    with pytest.raises(EOFError):
        link.read()
    with pytest.raises(OSError):
        link.send("hello")
    assert link.unsent == b""


# --- a worker that is stopped


def echo(link):
    while (message := link.recv()) is not None:
        link.send(message)


def started(function, **options):
    worker = WorkerProcess("worker", function, start_method="fork", **options)
    while not worker.has_started:
        worker.poll(1), worker.take()
    return worker


def test_a_stopped_worker_does_not_block_the_parent_in_either_direction():
    "Ten megabytes go there and come back, and at each moment of the way the worker may be stopped."
    worker = started(echo)
    data = os.urandom(10**7)
    members = Members()
    members.add(Member(0, worker, [0], 60.0))
    os.kill(worker.pid, signal.SIGSTOP)
    begin = time.monotonic()
    worker.send(data)
    assert members.wait(0.2) == [] and worker.take() is NOTHING
    parts = stops = 0
    while True:
        os.kill(worker.pid, signal.SIGCONT)
        members.wait(0.02)
        os.kill(worker.pid, signal.SIGSTOP)
        stops += 1
        if (message := worker.take()) is not NOTHING:
            break
        parts += len(worker.link.part) > 0
    assert message == data and parts > 0 and stops > 1
    assert time.monotonic() - begin < 20 * slack()
    os.kill(worker.pid, signal.SIGCONT)
    assert worker.close() is None


def test_a_worker_that_dies_in_the_middle_of_a_message():
    def dies(link):
        os.write(link.fileno(), _header(10**6) + bytes(1000))
        os.kill(os.getpid(), signal.SIGKILL)

    worker = started(dies)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        worker.receive()
    assert worker.close() is None


def test_a_stopped_worker_with_a_full_connection_is_ended():
    worker = started(echo, grace=0.2)
    os.kill(worker.pid, signal.SIGSTOP)
    worker.send(bytes(10**7))
    begin = time.monotonic()
    assert worker.close() is None and time.monotonic() - begin < 3 * slack()


def test_a_process_that_is_stopped_before_it_reads_its_arguments(tmp_path):
    "The parent starts it without waiting: here an interpreter that never runs, and arguments of ten megabytes."
    parent = forked_script(
        tmp_path,
        """
import multiprocessing, sys, time
from pathlib import Path
from test_link import echo
from rollpipe.pipes.workers import process
if __name__ == '__main__':
    never = Path(sys.argv[1])
    never.write_text(f'#!/bin/sh\\ncase "$*" in *spawn_main*) exec sleep 100;; *) exec {sys.executable} "$@";; esac\\n')
    never.chmod(0o755)
    multiprocessing.set_executable(str(never))
    worker = process.WorkerProcess('worker', echo, args=(bytes(10 ** 7),), start_method='spawn', grace=0.2)
    print(worker.take() is process.NOTHING, worker.current_traceback(), worker.patience(0.5), worker.close(), flush=True)
""",
        tmp_path / "never",
    )
    out, err = parent.communicate(timeout=60)
    assert (out, err) == (f"True (it is still being started) {STARTING} None\n", "")
