"""The command line in this process or in one of its own, and ways to wait for what it does; used by several tests.

A command is a line, or the beginning of one, as a shell would split it. What follows it are words, or texts of options.
"""

import os
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from forked import Forked, run_forked

from rollpipe.cli.main import main

SMALL = (
    "--n-envs 4 --n-steps 32 --hidden 8 --critic-hidden 8 --quiet --no-tensorboard".split()
)  # for learners on fragments


QUIET = "--quiet --no-tensorboard"
SMALL_LINE = " ".join(SMALL)


def words_of(line="", *more):
    "The words of a line and of what follows it: texts of options, which begin with `-`, and words."
    words = shlex.split(str(line))
    for part in map(str, more):
        words += shlex.split(part) if part.startswith("-") else [part]
    return words


def error_of(capsys, *words):
    "What a command says that is refused, with exit code 2, and prints nothing else."
    capsys.readouterr()
    assert rollpipe(*words) == 2, words
    out, err = capsys.readouterr()
    assert not out and "Traceback" not in err, out + err
    return err


def rollpipe(*words):
    "Exit code of a command; argparse raises SystemExit."
    try:
        return main(words_of(*words))
    except SystemExit as e:
        return e.code


def settings():
    "Environment variables with which other processes find the packages that this one finds, and use one thread as well."
    return dict(PYTHONPATH=os.pathsep.join(map(os.path.abspath, sys.path)), OMP_NUM_THREADS="1")


def process(*words, env=(), **kwargs):
    "Start a command in a process of its own, with these environment variables besides those that are set."
    return Forked(
        ["-m", "rollpipe", *words_of(*words)], {**os.environ, **settings(), **dict(env)}, **kwargs
    )


def python(*words, **kwargs):
    "Start a command with an interpreter of its own, for tests that look at its start or its end."
    return subprocess.Popen(
        [sys.executable, "-m", "rollpipe", *words_of(*words)],
        env={**os.environ, **settings()},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **kwargs,
    )


def run_command(folder, *words):
    "Run a command to its end in the current folder `folder`, which is not on its search path."
    return run_forked(
        ["-m", "rollpipe", *words_of(*words)],
        {**os.environ, **settings()},
        folder,
        timeout=300,
        is_on_path=False,
    )


def script(folder, *words):
    """Run a command to its end as an installed script does, whose own folder is on the path instead of the current one, `folder`.

    It has an interpreter of its own, and imports all that it needs.
    """
    code = "import sys; sys.path.remove(''); from rollpipe.cli.main import main; sys.exit(main())"
    package = str(Path(__file__).resolve().parents[1])
    return subprocess.run(
        [sys.executable, "-c", code, *words_of(*words)],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=300,
        env=dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=package),
    )


def wait_for(condition, child=None, seconds=120):
    "Wait until the condition holds; the child, if there is one, must not end before."
    deadline = time.monotonic() + seconds
    while not condition():
        assert child is None or child.poll() is None, child.communicate()
        assert time.monotonic() < deadline, f"it did not happen within {seconds} s"
        time.sleep(0.02)


def lines(path):
    return path.read_text().count("\n") if path.is_file() else 0


def opened(process):
    "The files that a process has opened; `process` is its folder in /proc."
    for file in (process / "fd").iterdir():
        with suppress(FileNotFoundError):
            yield os.readlink(file)


def alive(folder):
    "The numbers of the processes whose command line names the folder, or that have opened a file in it."
    found = []
    for process in filter(lambda path: path.name.isdigit(), Path("/proc").iterdir()):
        with suppress(OSError):  # it has ended
            words = (process / "cmdline").read_text()
            is_named = (
                str(folder) in words and "multiprocessing.forkserver" not in words
            )  # the server has our search path
            if is_named or any(file.startswith(f"{folder}/") for file in opened(process)):
                found.append(int(process.name))
    return found
