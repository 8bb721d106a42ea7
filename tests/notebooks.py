"""Runs notebooks as `nbdev_test` does, each in a process of its own: `python tests/notebooks.py [--jobs 2] [NOTEBOOK...]`.

To import torch takes longer than most notebooks do. So one process imports what is heavy, and forks a child for each notebook. The children
share nothing. The modules of rollpipe are left to them: each notebook shows that its own imports suffice. The drawings of graphs that a
cell shows must be those that are stored with it.
"""

import argparse
import faulthandler
import gc
import os
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import raises

sys.path.pop(0)  # notebooks do not see the helpers of the tests
ROOT = Path(__file__).resolve().parent.parent
FIRST = ("tutorials",)  # folders of slow notebooks: at the end nothing could run beside them
DRAWN = re.compile(r"^[ │├┌]*[○→└↑] \w+.*", re.M)  # a line of a drawing


def preload():
    "Import what many notebooks need and what starts no thread: a lock that another thread holds would stay locked in the children."
    import gymnasium  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import nbdev.test  # noqa: F401
    import torch
    import torch._dynamo  # noqa: F401  # the first optimizer imports torch._dynamo

    gc.freeze()  # no child looks through all this when it ends, which would take it a second
    assert threading.active_count() == 1, f"a module has started threads: {threading.enumerate()}"


def drawings(cell):
    "The lines of drawings in what a code cell shows."
    texts = (o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs)
    return DRAWN.findall("\n".join("".join(text) for text in texts))


def run(path):
    "Run the notebook at `path`, in this process; True if it passed."
    import nbdev.test
    import numpy as np
    from nbdev.config import get_config
    from nbdev.test import test_nb

    class Compares(nbdev.test.CaptureShell):
        def mark(self, directives):
            "With ROLLPIPE_RAISES, mark the `raise` statements of exported cells."
            if "default_exp" in directives:
                self.module = f"rollpipe.{directives['default_exp'][0]}"
            is_marked = raises.FILE and any(word.startswith("export") for word in directives)
            self.ast_transformers = [raises.Marks(self.module)] if is_marked else []

        def cell(self, cell, **options):
            if cell.cell_type != "code":
                return
            stored = drawings(cell)
            cell.outputs = []
            self.mark(getattr(cell, "directives_", {}))
            super().cell(cell, **options)
            if stored and not self.exc and (found := drawings(cell)) != stored:
                self.exc = AssertionError(f"it drew {found}, but stored is {stored}")

    nbdev.test.CaptureShell = Compares
    np.random.seed()  # as in a process that has just begun; `random` does so itself
    config = get_config()
    os.chdir(config.nbs_path)
    return test_nb(
        path, skip_flags=config.tst_flags.split(), basepath=config.config_path, do_print=True
    )[0]


class Child:
    "A process that runs the notebook at `path`, with a file for what it prints."

    def __init__(self, path):
        self.name = os.path.relpath(path, ROOT)
        self.begin = time.monotonic()
        self.output = tempfile.TemporaryFile()
        self.why = None
        self.pid = os.fork()
        if self.pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for stream in (1, 2):
                os.dup2(self.output.fileno(), stream)
            faulthandler.enable(self.output)
        os.setpgid(
            self.pid, 0
        )  # a group of its own, with all that it starts; both sides say so, as either may be first

    def age(self):
        return time.monotonic() - self.begin

    def stop(self, why):
        "Let the child show where it is, and end it."
        self.why = why
        os.kill(self.pid, signal.SIGABRT)
        time.sleep(0.5)
        self.clear()

    def clear(self):
        "End what is left of the group."
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def report(self, code):
        "Print how the child ended, which gave `code`; True if the notebook passed."
        self.output.seek(0)
        said = self.output.read().decode(errors="replace")
        passed = code == 0 and "\n- Completed " in said  # a cell may have ended the process
        if passed:
            print(f"notebook ok: {self.name}  {self.age():.1f} s", flush=True)
        else:
            why = self.why or (
                f"signal {-code} has ended it" if code < 0 else f"it has ended with status {code}"
            )
            print(f"{said}NOTEBOOK FAILED: {self.name}: {why}", flush=True)
        return passed


def run_all(paths, jobs, limit):
    "Run the notebooks at `paths`, `jobs` at a time, each for at most `limit` seconds; the number of those that failed."
    waiting = list(paths)
    running = {}
    failed = 0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                path = waiting.pop(0)
                child = Child(path)
                if child.pid == 0:
                    running.clear()  # they are not the child's to end
                    sys.exit(
                        not run(path)
                    )  # through the end of the interpreter, which runs what was registered for it
                running[child.pid] = child
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                child = running.pop(pid)
                child.clear()
                failed += not child.report(os.waitstatus_to_exitcode(status))
            for child in running.values():
                if child.age() > limit and child.why is None:
                    child.stop(f"it has run for more than {limit} s")
            if not pid:
                time.sleep(0.02)
    finally:
        for child in running.values():
            child.clear()
    return failed


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "notebooks",
        nargs="*",
        type=lambda name: Path(name).resolve(),
        help="which; all if none is named",
    )
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--limit", type=float, default=300, help="seconds that each may take")
    args = parser.parse_args()
    found = [
        p
        for p in (ROOT / "nbs").rglob("*.ipynb")
        if not any(part.startswith(".") for part in p.relative_to(ROOT).parts)
    ]
    paths = args.notebooks or sorted(found, key=lambda p: (p.parent.name not in FIRST, p))
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # who starts this in the background lets it ignore Ctrl-C, with the notebooks
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no notebook goes on alone
    preload()
    failed = run_all(paths, args.jobs, args.limit)
    if failed:
        sys.exit(
            f"notebooks: {failed} of {len(paths)} have not passed; look for NOTEBOOK FAILED above"
        )


if __name__ == "__main__":
    main()
