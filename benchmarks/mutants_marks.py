"""Which test reaches which mutant: the part of `mutants.py cover` inside of the tests' processes.

`mutants.py` puts a copy of this file, named `sitecustomize.py`, on the search path. So every Python process that a
test starts compiles the modules of the package with marks: before the statement of each mutant stands a call of
`sys.audit`, which a hook of the process and of its forks hears. Pytest loads the same module as a plugin, which says
which test is running. An account is written at once, so a process that is killed has told what it reached.

PYTEST_DONT_REWRITE: pytest would warn that the module is there before it can change its assertions.
"""

import ast
import json
import os
import sys
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path

from mutants_source import Source
from raises import MarkedPackage, call_before

FOLDER = os.environ.get("ROLLPIPE_MUTANTS")  # where the accounts go, and the list of mutants is
TEST = "ROLLPIPE_MUTANTS_TEST"  # the variable that names the test to the processes that it starts
EVENT = "rollpipe.mutant"
current = os.environ.get(TEST, "")  # the test that is running
reached = set()  # (number of a mutant, test)
began = 0.0, 0.0  # the wall time and the processor time when the test began


def marked(tree, numbers_of):
    "Put a call before each statement that `numbers_of` knows, a dict: id of its node -> numbers of mutants."
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, [*_with_marks(block, numbers_of)])
    return tree


def _with_marks(block, numbers_of):
    for node in block:
        for number in numbers_of.get(id(node), ()):
            yield call_before(node, EVENT, number)
        yield node


class ModuleWithMutants(SourceFileLoader):
    "Compiles a module with the marks of its mutants; the compiled form is not kept."

    def get_code(self, name):
        source = Source(self.get_data(self.path).decode())
        numbers_of = {}
        for statement in source.statements:
            place = [statement.scope, statement.text, statement.occurrence]
            numbers = [number for number, wanted in places.get(name, ()) if wanted == place]
            if numbers:
                numbers_of[id(statement.node)] = numbers
        tree = marked(source.tree, numbers_of)
        return compile(tree, self.path, "exec", dont_inherit=True)


def hear(event, arguments):
    "Write which mutant was reached by which test, once."
    if event == EVENT:
        account = arguments[0], current
        if account not in reached:
            reached.add(account)
            write_line(mutant=arguments[0], test=current)


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
    global began, current
    if is_worker():
        os.environ[TEST] = current = nodeid
        began = now()


def pytest_runtest_logfinish(nodeid):
    global current
    if is_worker():
        seconds, busy_seconds = (end - start for end, start in zip(now(), began))
        write_line(test=nodeid, seconds=seconds, busy_seconds=busy_seconds)
        os.environ[TEST] = current = ""


def pytest_runtest_logreport(report):
    "A test that fails or is skipped can kill no mutant."
    if is_worker() and report.outcome != "passed":
        write_line(test=report.nodeid, outcome=report.outcome)


if FOLDER and __name__ == "sitecustomize":
    # name of a module -> (number, (scope, text, occurrence)) of each mutant
    places = json.loads(Path(FOLDER, "places.json").read_text())
    sys.addaudithook(hear)
    sys.meta_path.insert(0, MarkedPackage(ModuleWithMutants))
