"""Small wrong changes of the package (mutants), and which part of a suite notices them.

    python benchmarks/mutants.py list --out build/mutants.json               # 400 mutants, the same for the same seed
    python benchmarks/mutants.py cover --list build/mutants.json --out build/cover.json.gz    # the quick tests once
    python benchmarks/mutants.py run --list build/mutants.json --cover build/cover.json.gz --out build/mutants.csv
    python benchmarks/mutants.py report build/mutants.csv                    # by room; two files are compared

`--suite FOLDER` (of `cover` and `run`) names a checkout whose tests/ and nbs/ are asked, and `--package FOLDER` one
whose rollpipe/ is changed; both are this checkout otherwise. `--after RESULTS` asks only about the mutants that the
suite of these results has left alive. So two suites are compared on the same mutants.

A mutant changes an operator, a condition, a constant or two arguments, or it drops a call, an assignment or a raise
(`mutants_source.py`). It is made in a copy of the tree: in the module, and in its notebook where the text is found.
Then the notebook is run, and after it the quick tests that reach the statement (`mutants_marks.py`), the fastest
first, at most 60 s of them, until one fails. What has killed a mutant for the first time must pass without any
change, or it is left out from then on. Who takes more than 90 s of processor time has killed the mutant by time. Each
mutant is a process that is forked by one which has imported torch.

`run --resume` continues a file of results. `run --notebooks-only` needs no `cover`: what a notebook does not kill is
pending, and a later `run --resume` asks the tests about it. `cover` needs Linux and as long as the quick tests.
"""

import argparse
import compileall
import csv
import ctypes
import gc
import gzip
import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import mutants_source

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "__pycache__", ".*_cache", ".hypothesis"
)
NOT_ASKED = ("test_sync", "test_habits", "test_notebooks")  # they read texts, or run notebooks
MODULE_TESTS = "tests/test_imports.py"  # asked for lines that run when a module is imported

BUDGETS = (6, 54)  # seconds of tests, asked one after the other
FILE_SECONDS = 0.3  # to collect a file of tests
BUSY_LIMIT = 90  # seconds of processor time until a notebook or tests are ended
LIMIT = 240  # and seconds of the clock

# Killed by the notebook, by tests, by time; not killed; the notebook alone was asked; the text is gone
RESULTS = "notebook", "tests", "time", "survived", "not covered", "pending", "gone"
LEFT = "survived", "not covered", "pending"
FIELDS = "number", "room", "file", "line", "kind", "result", "by", "seconds", "before", "after"


def make_tree(folder, suite, package):
    "A copy of the checkout `suite` with the package of the checkout `package`."
    shutil.copytree(suite, folder, ignore=LEFT_OUT, symlinks=True)
    shutil.rmtree(folder / "rollpipe")
    shutil.copytree(package / "rollpipe", folder / "rollpipe", ignore=LEFT_OUT)
    compileall.compile_dir(folder / "rollpipe", quiet=2)


def environment(folder, *more):
    "The variables of processes that take the package from `folder`."
    path = os.pathsep.join(map(str, (*more, folder)))
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


# ---------------------------------------------------------------- which test reaches which mutant


def name_of(module):
    "`rollpipe.pipes.steps` of `rollpipe/pipes/steps.py`."
    return module.removesuffix(".py").replace("/", ".")


def cover(args):
    "Run the quick tests once, and write which of them reach which mutant, and how long each takes."
    work = args.work
    shutil.rmtree(work, ignore_errors=True)
    tree = work / "tree"
    data = work / "data"
    hooks = work / "hooks"
    make_tree(tree, args.suite, args.package)
    data.mkdir()
    hooks.mkdir()
    shutil.copyfile(HERE / "mutants_marks.py", hooks / "sitecustomize.py")
    shutil.copyfile(HERE / "mutants_source.py", hooks / "mutants_source.py")
    shutil.copyfile(ROOT / "tests/raises.py", hooks / "raises.py")

    # name of a module -> (number, place) of its mutants
    places = defaultdict(list)
    left = left_by(args.after)
    for number, mutant in enumerate(mutants_source.read(args.list)):
        if left is None or number in left:
            place = mutant.scope, mutant.statement, mutant.occurrence
            places[name_of(mutant.file)].append((number, place))
    (data / "places.json").write_text(json.dumps(places))

    env = {**os.environ, **environment(tree, hooks), "ROLLPIPE_MUTANTS": str(data)}
    command = [sys.executable, "-m", "pytest", "-q"]
    command += ["-p", "sitecustomize", "-p", "no:cacheprovider"]
    command += ["--numprocesses", str(args.jobs), "--dist", "loadfile", "--no-loadscope-reorder"]
    ignored = [f"--ignore=tests/{name}.py" for name in NOT_ASKED]
    subprocess.run([*command, *ignored, *args.tests], cwd=tree, env=env)
    digest(data, args.out)
    if not args.keep:
        shutil.rmtree(work)


def left_by(path):
    "The numbers of the mutants that these results have left alive; None without results."
    if path is None:
        return None
    results = {int(row["number"]): row["result"] for row in rows_of(path)}
    return {number for number, result in results.items() if result in LEFT}


def is_named_after(test, module):
    "Does the file of a test have the name of the module, as `test_returns.py` has of `returns.py`?"
    return Path(module).stem in test.partition("::")[0]


def digest(data, out):
    "Write what the files in the folder `data` say as one file."
    seconds = {}  # of the tests that have passed
    others = set()
    reached_by = defaultdict(set)  # number of a mutant -> tests
    for file in data.glob("*.tests"):
        for line in file.read_text().splitlines():
            try:
                account = json.loads(line)
            except ValueError:
                continue  # the process was killed while it wrote
            if "mutant" in account:
                reached_by[account["mutant"]].add(account["test"])
            elif "seconds" in account:
                # The processor time does not depend on other work of the machine. A test that waits has little.
                least = account["seconds"] / 4
                seconds[account["test"]] = max(account["busy_seconds"], least)
            else:
                others.add(account["test"])
    seconds = {test: s for test, s in seconds.items() if test not in others}

    # Tests have numbers, the fastest the smallest; -1 stands for the import of a module
    names = sorted(seconds, key=lambda test: (seconds[test], test))
    number_of = {"": -1, **{name: n for n, name in enumerate(names)}}
    reached = {
        mutant: sorted(number_of[test] for test in tests if test in number_of)
        for mutant, tests in reached_by.items()
    }
    content = {"tests": [[name, round(seconds[name], 3)] for name in names], "reached": reached}
    with gzip.open(out, "wt") as file:
        json.dump(content, file)
    print(f"{len(names)} tests have passed, {len(others)} have not: {out}")


class Coverage:
    "What `cover` has written."

    def __init__(self, path):
        with gzip.open(path, "rt") as file:
            content = json.load(file)
        self.tests = [(name, seconds) for name, seconds in content["tests"]]
        self.reached = content["reached"]

    def tests_of(self, number, module):
        "The (name, seconds) of the tests that reach a mutant, in the order to ask them."
        numbers = self.reached.get(str(number), ())
        tests = {self.tests[n] for n in numbers if n >= 0}

        # What runs when the module is imported is not reached by a test alone.
        if -1 in numbers:
            for test in self.tests:
                if test[0].startswith(MODULE_TESTS) or is_named_after(test[0], module):
                    tests.add(test)

        def rank(test):
            name, seconds = test
            return seconds * (1 if is_named_after(name, module) else 3), name

        return sorted(tests, key=rank)


def portions(tests):
    "The names of tests for each of `BUDGETS`, those of a file together."
    waiting = list(tests)
    for budget in BUDGETS:
        files = defaultdict(list)
        while waiting:
            name, seconds = waiting[0]
            file = name.partition("::")[0]
            budget -= seconds + FILE_SECONDS * (file not in files)
            if budget < 0 and files:
                break
            files[file].append(name)
            waiting.pop(0)
        if files:
            yield [name for names in files.values() for name in names]


# --------------------------------------------------------------------- processes that are forked


def preload():
    "Import what most tests and notebooks need and what starts no thread, but nothing of rollpipe."
    for name in ("gymnasium", "matplotlib.pyplot", "nbdev.test", "pytest", "torch._dynamo"):
        importlib.import_module(name)
    gc.freeze()
    assert threading.active_count() == 1, f"a module has started threads: {threading.enumerate()}"


def follow_parent():
    "This process ends with its parent."
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def adopt_orphans():
    "Descendants whose parent ends become children of this process."
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def end_children():
    "Kill all children, and theirs, which become children of this process."
    own = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    while pids := own.read_text().split():
        for pid in map(int, pids):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


class Outcome(NamedTuple):
    "How a forked process ended: its exit code, or None if it took too long."

    code: int | None
    output: str


def busy_seconds_of(pid):
    "The processor time of a process and of its children that have ended."
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def in_child(function, tree):
    "Call a function in a process of its own whose package is that in `tree`."
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                follow_parent()
                code = _prepared(function, tree, output)
            except BaseException as e:
                print(f"{type(e).__name__}: {e}", flush=True)
            finally:
                sys.stdout.flush()
                os._exit(code)

        # Wait for its end
        code = None
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline and busy_seconds_of(pid) < BUSY_LIMIT:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                break
            time.sleep(0.02)
        end_children()
        output.seek(0)
        return Outcome(code, output.read().decode(errors="replace"))


def _prepared(function, tree, output):
    "In the child: call the function where a shell would stand in `tree`."
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    os.chdir(tree)
    os.environ.update(environment(tree))

    # No other checkout is on the search path.
    others = [p for p in sys.path if (Path(p) / "rollpipe").is_dir() or Path(p) == HERE]
    sys.path[:] = [str(tree), *(p for p in sys.path if p not in others)]
    return function()


PASSED = 42


def run_notebook(path):
    "In the child: run a notebook as tests/notebooks.py does."
    os.environ["ROLLPIPE_SHORT"] = "1"
    sys.path.insert(0, "tests")
    sys.argv[:] = ["notebooks.py"]
    notebooks = importlib.import_module("notebooks")
    return PASSED if notebooks.run(path) else 1


class FirstFailure:
    "A plugin of pytest that writes which test, or which file, was the first to fail."

    def __init__(self, path):
        self.path = path

    def _note(self, report):
        if report.failed and not self.path.exists():
            self.path.write_text(report.nodeid)

    pytest_runtest_logreport = _note
    pytest_collectreport = _note


def run_tests(names, account, folder):
    "In the child: run tests until one fails."
    import pytest

    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={folder}"]
    code = pytest.main([*options, *names], plugins=[FirstFailure(account)])
    return PASSED if code == 0 else int(code)


# ------------------------------------------------------------------------------- kills of mutants


class Job:
    "One mutant after the other, in a copy of the tree."

    def __init__(self, folder, suite, package, coverage):
        self.tree = folder / "tree"
        self.account = folder / "first_failure"
        self.folder = folder / "tests"
        self.coverage = coverage
        make_tree(self.tree, suite, package)
        self.notebooks = mutants_source.notebooks_by_module(self.tree / "nbs")
        self.reliable = set()  # notebooks and tests that have passed without a change
        self.unreliable = set()

    def judge(self, number, mutant, has_passed_notebook=False):
        """The (result, by) of a mutant; `has_passed_notebook` if its notebook need not be asked again.

        Without coverage no test is asked.
        """
        module = self.tree / mutant.file
        text = module.read_text() if module.exists() else ""
        new_text = mutants_source.changed(mutant, text)
        if new_text is None:
            return "gone", ""
        texts = {module: (text, new_text)}
        is_in_notebook = False
        notebook = self.notebooks.get(mutant.file)
        if notebook is not None:
            cells = notebook.read_text()
            new_cells = mutants_source.changed_notebook(mutant, cells)
            is_in_notebook = new_cells is not None
            if is_in_notebook:
                texts[notebook] = cells, new_cells

        # The notebook
        if is_in_notebook and not has_passed_notebook:
            result = self._asked(texts, [str(notebook)], self._ask_notebook)
            if result:
                return ("notebook" if result[0] == "failed" else "time"), result[1]

        # The tests
        if self.coverage is None:
            return "pending", ""
        tests = self.coverage.tests_of(number, mutant.file)
        for names in portions(tests):
            result = self._asked(texts, names, self._ask_tests)
            if result:
                return ("tests" if result[0] == "failed" else "time"), result[1]
        return ("survived" if tests else "not covered"), ""

    def _asked(self, texts, names, ask):
        "None if all pass; else how, and by whom, the mutant was noticed."
        while True:
            names = [name for name in names if name not in self.unreliable]
            if not names:
                return None
            self._write(texts, is_changed=True)
            try:
                failure = ask(names)
            finally:
                self._write(texts, is_changed=False)
            if failure is None:
                return None

            # A failure is believed if there is none without the change.
            how, by = failure
            if how == "late":
                witnesses = names
            else:
                witnesses = [next(name for name in names if name.startswith(by))]
            if self.reliable.issuperset(witnesses) or ask(witnesses) is None:
                self.reliable.update(witnesses)
                return failure
            if how == "late":
                return None  # this machine is too busy for them
            self.unreliable.update(witnesses)
            print(f"fails without a change, so it is not asked: {witnesses}", flush=True)

    def _write(self, texts, is_changed):
        "Write the changed or the first texts; no bytecode of the others is left."
        for path, versions in texts.items():
            path.write_text(versions[is_changed])
            for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
                compiled.unlink()

    def _ask_notebook(self, names):
        [path] = names
        outcome = in_child(lambda: run_notebook(Path(path)), self.tree)
        return self._failure(outcome, path)

    def _ask_tests(self, names):
        self.account.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        outcome = in_child(lambda: run_tests(names, self.account, self.folder), self.tree)
        by = self.account.read_text() if self.account.exists() else ""

        # The name of a case may depend on the package, or on the process. Such tests are not asked.
        places = re.findall(r"^ERROR: not found: (.+)$", outcome.output, re.M)
        missing = {place.removeprefix(f"{self.tree}/") for place in places}
        if not by and missing:
            others = [name for name in names if name not in missing]
            return self._ask_tests(others) if 0 < len(others) < len(names) else None
        if not any(name.startswith(by) for name in names):
            by = ""  # neither a test nor a file: nothing could be collected
        return self._failure(outcome, by)

    def _failure(self, outcome, by):
        if outcome.code == PASSED:
            return None
        return ("late" if outcome.code is None else "failed"), by


def run(args):
    "Judge the mutants of a list, and append a line for each to the results."
    mutants = mutants_source.read(args.list)
    results = {}  # the last result of each mutant
    if args.out.exists():
        if not args.resume:
            sys.exit(f"{args.out} exists: --resume continues it")
        results = {int(row["number"]): row["result"] for row in rows_of(args.out)}
    else:
        add_row(args.out, dict(zip(FIELDS, FIELDS)))
    coverage = None if args.notebooks_only else Coverage(args.cover)
    left = left_by(args.after)
    open_results = (None,) if args.notebooks_only else (None, "pending")
    waiting = [
        (n, mutant, results.get(n) == "pending")
        for n, mutant in enumerate(mutants)
        if results.get(n) in open_results and (left is None or n in left)
    ]
    waiting = waiting[: args.most]

    # One process for each job, which forks for each mutant
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.update(environment(ROOT))
    preload()
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        jobs = {}
        try:
            for number in range(args.jobs):
                own = waiting[number :: args.jobs]
                pid = os.fork()
                if pid == 0:
                    jobs.clear()
                    work(Path(folder) / str(number), own, args, coverage)
                jobs[pid] = number
            while jobs:
                pid, status = os.wait()
                if pid in jobs and status:
                    print(f"a job has ended with {os.waitstatus_to_exitcode(status)}", flush=True)
                jobs.pop(pid, None)
        finally:
            end_children()


def work(folder, waiting, args, coverage):
    "In the process of a job: judge its mutants."
    code = 1
    try:
        follow_parent()
        adopt_orphans()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        folder.mkdir()
        job = Job(folder, args.suite, args.package, coverage)
        for number, mutant, has_passed_notebook in waiting:
            began = time.monotonic()
            result, by = job.judge(number, mutant, has_passed_notebook)
            seconds = round(time.monotonic() - began, 1)
            row = dict(mutant._asdict(), number=number, result=result, seconds=seconds)
            row["by"] = by.removeprefix(f"{job.tree}/")
            add_row(args.out, {name: " ".join(str(row[name]).split()) for name in FIELDS})
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


# ------------------------------------------------------------------------------------------ report


def add_row(path, row):
    "Append a row at once, because several processes write."
    text = io.StringIO()
    csv.DictWriter(text, FIELDS).writerow(row)
    with open(path, "a") as file:
        file.write(text.getvalue())


def rows_of(path):
    "The rows of a file of results; the last one may have been cut off."
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if row["after"] is not None]


def report(args):
    "Print a table by room for each file of results, and what the last misses of the first."
    rows = [{row["number"]: row for row in rows_of(path)} for path in args.results]
    for path, rows_of_file in zip(args.results, rows):
        counts = defaultdict(Counter)
        for row in rows_of_file.values():
            for room in (row["room"], "all"):
                counts[room][row["result"]] += 1
        print(f"\n{path}: {len(rows_of_file)} mutants\n")
        print(f"| room | mutants | {' | '.join(RESULTS)} |")
        print("|---" * (len(RESULTS) + 2) + "|")
        for room in sorted(counts, key=lambda room: (room == "all", room)):
            cells = [str(counts[room][result]) for result in RESULTS]
            print(f"| {room} | {counts[room].total()} | {' | '.join(cells)} |")

    # Mutants that the first suite kills, and the last one does not
    if len(rows) > 1:
        print()
        common = rows[0].keys() & rows[-1].keys()
        for number in sorted(common, key=int):
            first, last = rows[0][number], rows[-1][number]
            if first["result"] in RESULTS[:3] and last["result"] in LEFT:
                change = f"{first['before']!r} -> {first['after']!r}"
                place = f"{first['file']}:{first['line']}"
                print(f"{place}: {change}: killed by {first['by']}, now {last['result']}")


def make_list(args):
    "Write the mutants."
    mutants = mutants_source.sample(args.package, args.number, args.seed)
    mutants_source.write(mutants, args.out)
    kinds = Counter(mutant.kind for mutant in mutants)
    print(f"{len(mutants)} mutants ({', '.join(f'{k} {n}' for k, n in kinds.items())}): {args.out}")


def path_of(text):
    return Path(text).resolve()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="list|cover|run|report")

    command = commands.add_parser("list", help="choose the mutants")
    command.set_defaults(function=make_list)
    command.add_argument("--out", type=path_of, required=True, help="a JSON file to write")
    command.add_argument("--package", type=path_of, default=ROOT, help="the checkout to change")
    command.add_argument("--number", type=int, default=400)
    command.add_argument("--seed", type=int, default=0)

    command = commands.add_parser("cover", help="which quick test reaches which mutant")
    command.set_defaults(function=cover)
    command.add_argument("--list", type=path_of, required=True, help="what `list` has written")
    command.add_argument("--after", type=path_of, help="mark only what these results left alive")
    command.add_argument("--out", type=path_of, required=True, help="a .json.gz file to write")
    command.add_argument("--suite", type=path_of, default=ROOT, help="the checkout of the tests")
    command.add_argument("--package", type=path_of, default=ROOT, help="the checkout to change")
    command.add_argument("--work", type=path_of, default=ROOT / "build/mutants", help="a folder")
    command.add_argument("--keep", action="store_true", help="keep this folder")
    command.add_argument("--jobs", type=int, default=2)
    command.add_argument(
        "tests", nargs="*", help="files of tests; all quick tests if none is named"
    )

    command = commands.add_parser("run", help="judge the mutants")
    command.set_defaults(function=run)
    command.add_argument("--list", type=path_of, required=True, help="what `list` has written")
    command.add_argument("--cover", type=path_of, help="what `cover` has written")
    command.add_argument("--after", type=path_of, help="judge only what these results left alive")
    command.add_argument("--notebooks-only", action="store_true", help="ask no tests")
    command.add_argument("--out", type=path_of, required=True, help="a CSV file to append to")
    command.add_argument("--suite", type=path_of, default=ROOT, help="the checkout of the tests")
    command.add_argument("--package", type=path_of, default=ROOT, help="the checkout to change")
    command.add_argument("--jobs", type=int, default=2)
    command.add_argument("--most", type=int, help="how many mutants at most")
    command.add_argument("--resume", action="store_true", help="continue a file of results")

    command = commands.add_parser("report", help="print results by room")
    command.set_defaults(function=report)
    command.add_argument("results", nargs="+", type=path_of, help="what `run` has written")

    args = parser.parse_args()
    if args.function is run and not (args.cover or args.notebooks_only):
        parser.error("run needs --cover, or --notebooks-only")
    args.function(args)


if __name__ == "__main__":
    main()
