"""Which test reaches which line of the package: the part of `mutants.py cover` inside of the tests' processes.

`mutants.py` puts a copy of this file, named `sitecustomize.py`, on the search path. So every Python process that a
test starts measures its own coverage, also a forked one, and pytest loads the same module as a plugin, which says
which test is running. What a process has measured is saved when it ends; of one that is killed it is lost.

PYTEST_DONT_REWRITE: pytest would warn that the module is there before it can change its assertions.
"""

import atexit
import json
import os
import time

FOLDER = os.environ.get("ROLLPIPE_COVERAGE")  # where the data go
SOURCE = os.environ.get("ROLLPIPE_COVERAGE_SOURCE")  # the package
measured = None  # the `Coverage` of this process
data_file = None
began = 0.0, 0.0  # the wall time and the processor time when the test began
exit_at_once = os._exit


def begin():
    "Measure from now on, into a file of this process."
    global measured, data_file
    from coverage import Coverage

    data_file = f"{FOLDER}/{os.getpid()}-{time.monotonic_ns()}.data"
    measured = Coverage(data_file=data_file, source=[SOURCE], config_file=False, messages=False)
    measured.start()


def end():
    "Save what was measured, and the test during which this process ended."
    global measured
    coverage, measured = measured, None
    if coverage is None or not os.path.isdir(FOLDER):
        return
    coverage.stop()
    coverage.save()
    with open(f"{data_file}.test", "w") as file:
        file.write(os.environ.get("ROLLPIPE_COVERAGE_TEST", ""))


def begin_in_fork():
    "A forked process leaves what it was given to its parent."
    if measured is not None:
        measured.stop()
        begin()


def end_and_exit(status):
    "What stands for `os._exit`, with which forked processes end."
    try:
        end()
    finally:
        exit_at_once(status)


def write_line(**fields):
    "Append an account to the file of this process."
    with open(f"{FOLDER}/{os.getpid()}.tests", "a") as file:
        file.write(json.dumps(fields) + "\n")


def is_worker():
    "Do tests run in this process? They do so in those of xdist, which are told after their start."
    return "PYTEST_XDIST_WORKER" in os.environ


def now():
    "The wall time, and the processor time of this process and of its children that have ended."
    return time.monotonic(), sum(os.times()[:4])


def pytest_runtest_logstart(nodeid):
    "All that happens for a test, its fixtures included, is reached by it."
    global began
    if is_worker():
        measured.switch_context(nodeid)
        os.environ["ROLLPIPE_COVERAGE_TEST"] = nodeid
        began = now()


def pytest_runtest_logfinish(nodeid):
    if is_worker():
        seconds, busy_seconds = (end - start for end, start in zip(now(), began))
        write_line(test=nodeid, seconds=seconds, busy_seconds=busy_seconds)
        measured.switch_context("")


def pytest_runtest_logreport(report):
    "A test that fails or is skipped can kill no mutant."
    if is_worker() and report.outcome != "passed":
        write_line(test=report.nodeid, outcome=report.outcome)


if FOLDER and __name__ == "sitecustomize":
    begin()
    atexit.register(end)
    os.register_at_fork(after_in_child=begin_in_fork)
    os._exit = end_and_exit
