"""Check that streams and trainings are the same as in another commit, bit for bit.

    python benchmarks/same_stream.py REV [--only GROUP GROUP.CASE ...] [--jobs 2]

The cases of `benchmarks/stream_cases` run twice, both times as they are in this working tree: against the package of the commit `REV`, in
a temporary worktree, and against the package here, with its uncommitted changes. One line is printed for each case. If a case differs,
its line names the first leaf that differs. The exit status is 1 if a case differs, or fails on either side. Names and messages that were
changed on purpose are stated in `RENAMED`, `REWORDED` and `ADDED`, at the top of `stream_cases/__init__.py`.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from stream_cases import ADDED, PROCESSES, RENAMED, REWORDED, is_wanted, run
from stream_cases import compare as trees

HERE = Path(__file__).resolve().parent.parent


def renamed(text) -> str:
    "The text with new names in place of the old ones, where they are whole words."
    return re.sub(r"\w+", lambda word: RENAMED.get(word[0], word[0]), text)


def reworded(text) -> str:
    "A message with new phrases in place of the old ones, and new names."
    for old, new in REWORDED.items():
        text = text.replace(old, new)
    return renamed(text)


def compare(there, here) -> str:
    "The difference between the two records of a case (`stream_cases.record`, or None); empty if there is none."
    there, here = (
        side or dict(error="the process ended before the case did", trace="")
        for side in (there, here)
    )
    if "error" in there and "error" in here:
        both = reworded(there["error"]) == here["error"]
        return f"fails on both sides{'' if both else ' in different ways'}: {here['error']}\n{tail(here['trace'])}"
    for side, name in ((there, "there"), (here, "here")):
        if "error" in side:
            return f"fails only {name}: {side['error']}\n{tail(side['trace'])}"
    return first_difference(
        [
            [renamed(path), form if sha else reworded(form), sha]
            for path, form, sha in there["leaves"]
        ],
        here["leaves"],
    )


def first_difference(there, here) -> str:
    "The first leaf that differs or is missing, of two lists of `[path, form, sha256]`; empty if they are the same."
    old, new = ({path: (form, sha) for path, form, sha in leaves} for leaves in (there, here))
    new = {
        path: leaf
        for path, leaf in new.items()
        if path in old or leaf[0] != "None" or path.rpartition(".")[2] not in ADDED
    }
    return next(
        (
            f"{path}: {described(was)} there, {described(now)} here"
            for path, was, now in trees.differing(old, new)
        ),
        "",
    )


def described(leaf) -> str:
    "Form and hash of a leaf, in short; None is a leaf that is missing."
    return "no such leaf" if leaf is None else f"{leaf[0]} {leaf[1][:12]}".strip()


def tail(trace, n=6) -> str:
    return "\n".join(f"    {line}" for line in trace.rstrip().splitlines()[-n:])


def git(*args) -> str:
    "The output of a git command in this repository; ends the program with git's message if it fails."
    done = subprocess.run(["git", "-C", str(HERE), *args], text=True, capture_output=True)
    if done.returncode:
        sys.exit(done.stderr.strip() or f"git {args[0]} failed")
    return done.stdout.strip()


@contextmanager
def checked_out(rev, folder):
    "A temporary worktree with the commit `rev` in an empty folder."
    commit = git("rev-parse", "--verify", f"{rev}^{{commit}}")
    tree = Path(folder) / "there"
    try:
        git("worktree", "add", "--detach", "--quiet", str(tree), commit)
        yield tree
    finally:
        # git locks a worktree as long as it makes it, and does not remove one that is half made.
        subprocess.run(
            ["git", "-C", str(HERE), "worktree", "unlock", str(tree)], capture_output=True
        )
        shutil.rmtree(tree, ignore_errors=True)
        git("worktree", "prune")


class Task:
    "Groups of cases, run against the package of one tree in a process (and a process group) of its own."

    def __init__(self, side, root, groups, only, folder):
        self.side = side
        self.groups = groups
        self.folder = Path(folder) / side / groups[0]
        self.out = self.folder / "out"
        self.folder.mkdir(parents=True)
        environment = {
            **os.environ,
            "PYTHONPATH": str(root),
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
        }
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--run",
            str(root),
            str(self.out),
            ",".join(groups),
            *only,
        ]
        with open(self.folder / "errors", "w") as errors:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=subprocess.STDOUT,
            )

    def records(self) -> dict:
        "Case -> record, of the cases that came to an end."
        lines = self.out.read_text().splitlines() if self.out.exists() else []
        return {name: record for line in lines for name, record in json.loads(line).items()}

    def trouble(self) -> str:
        "Why the process did not come to its end; empty if it did."
        code = self.process.poll()
        return (
            f"the process ended with {code}\n{tail((self.folder / 'errors').read_text())}"
            if code
            else ""
        )

    def stop(self):
        "End the process and its workers, after a short time to clean up."
        try:
            os.killpg(self.process.pid, signal.SIGINT)
        except ProcessLookupError:
            return
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)


def finished(starts, jobs):
    "Start the tasks, `jobs` at a time, and yield each one when it has ended. They are stopped if this ends early."
    waiting = list(starts)
    running = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(waiting.pop(0)())
            for task in [task for task in running if task.process.poll() is not None]:
                running.remove(task)
                yield task
            time.sleep(0.05)
    finally:
        for task in running:
            task.stop()


def compare_trees(there, here, processes, only, jobs, folder):
    "Yield `(case, what is wrong)` for each case; empty is fine. A process that did not come to its end counts as a case."
    starts = [
        partial(Task, side, root, groups, only, folder)
        for groups in processes
        for side, root in (("there", there), ("here", here))
    ]
    ended = {}
    with closing(finished(starts, jobs)) as tasks:
        for task in tasks:
            if task.trouble():
                yield f"{task.side}: {', '.join(task.groups)}", task.trouble()
            other = ended.setdefault(task.groups, task)
            if other is task:
                continue
            old, new = (
                (task if task.side == side else other).records() for side in ("there", "here")
            )
            for name in [*new, *(name for name in old if name not in new)]:
                yield name, compare(old.get(name), new.get(name))


def main(rev, only=(), jobs=2) -> int:
    "Compare this tree with the commit `rev`; returns how many cases differ or fail."
    wanted = [
        tuple(g for g in groups if not only or any(name.split(".")[0] == g for name in only))
        for groups in PROCESSES
    ]
    start = time.monotonic()
    bad = 0
    seen = []
    with (
        tempfile.TemporaryDirectory() as folder,
        checked_out(rev, folder) as there,
        closing(
            compare_trees(there, HERE, [groups for groups in wanted if groups], only, jobs, folder)
        ) as results,
    ):
        for name, wrong in results:
            seen.append(name)
            bad += bool(wrong)
            print(f"WRONG {name}: {wrong}" if wrong else f"ok    {name}", flush=True)
    if missing := [name for name in only if not any(is_wanted(x, [name]) for x in seen)]:
        sys.exit(f"no such cases: {', '.join(missing)}")
    print(
        f"{len(seen) - bad} of {len(seen)} cases are the same as in {rev}, after {time.monotonic() - start:.0f} s"
    )
    return bad


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        sys.exit(run(sys.argv[2], sys.argv[3], sys.argv[4].split(","), sys.argv[5:]))
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # like Ctrl-C, so that the worktree is removed
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rev", help="the commit to compare with")
    parser.add_argument(
        "--only", nargs="+", default=[], help="run only these groups, or cases as GROUP.CASE"
    )
    parser.add_argument("--jobs", type=int, default=2, help="number of processes at the same time")
    try:
        sys.exit(bool(main(**vars(parser.parse_args()))))
    except KeyboardInterrupt:
        sys.exit(130)
