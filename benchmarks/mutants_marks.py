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
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

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
            # On the line of the statement, so that tracebacks stay as they are
            call = ast.parse(f"__import__('sys').audit({EVENT!r}, {number})").body[0]
            for part in ast.walk(call):
                ast.copy_location(part, node)
            yield call
        yield node


class MarkedModule(SourceFileLoader):
    "Compiles a module with its marks; the compiled form is not kept."

    places = ()  # (number, (scope, text, occurrence)) of each mutant

    def get_code(self, name):
        from mutants_source import Source

        source = Source(self.get_data(self.path).decode())
        numbers_of = {}
        for statement in source.statements:
            place = [statement.scope, statement.text, statement.occurrence]
            numbers = [number for number, wanted in self.places if wanted == place]
            if numbers:
                numbers_of[id(statement.node)] = numbers
        tree = marked(source.tree, numbers_of)
        return compile(tree, self.path, "exec", dont_inherit=True)


class MarkedPackage:
    "Finds the modules of rollpipe that have mutants, and no others."

    def __init__(self, places):
        self.places = places

    def find_spec(self, name, path=None, target=None):
        if name not in self.places:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = MarkedModule(spec.loader.name, spec.loader.path)
            spec.loader.places = self.places[name]
        return spec


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
    places = json.loads(Path(FOLDER, "places.json").read_text())
    sys.addaudithook(hear)
    sys.meta_path.insert(0, MarkedPackage(places))
