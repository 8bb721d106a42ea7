"""Programs in processes of their own, which a server forks that has imported torch and rollpipe: to start an interpreter takes seconds.

The runs of an experiment, a bench or a search are forks, too. Tests that look at the start itself, at its imports or at its search path use
`subprocess`, as `test_files_of_the_working_folder_have_the_names_of_modules_of_python` does for such a run.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import types
from multiprocessing import connection, forkserver
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import raises  # before rollpipe: says which of its `raise` statements are reached
import torch

from rollpipe.results import experiments

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        *["raises"] * bool(raises.FILE),
        "torch._dynamo",
        "gymnasium.envs.classic_control",
        "rollpipe.agents.learner",
        "rollpipe.cli.main",
        "onnx",  # for most trainings, if it is there; onnxruntime has a thread
        "pytest",
        "worker_cases",
        "fault_cases",
    ]
)  # for workers of tests


def ensure_running(start=forkserver.ensure_running):
    "Start the server, if there is none. It lives as long as this process, and finds the modules beside this one."
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before]))
    try:
        start()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


forkserver._forkserver.ensure_running = ensure_running  # whoever starts it


def run_program(words, env, folder, is_on_path, streams, in_session, ignored):
    "In the child: become `python` with these words."
    if in_session:
        os.setsid()
    signal.pthread_sigmask(
        signal.SIG_SETMASK, ()
    )  # the server may have been started while some signals waited
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), number)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", closefd=False) for number in (1, 2)
    )  # a thread of the parent may hold the locks
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = dict.fromkeys(
        [
            *[folder] * is_on_path,
            *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)),
            *sys.path,
        ]
    )
    np.random.seed()  # as in a process that has just begun
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", 1)))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[:2] == ["-m", "rollpipe"]:
        from rollpipe.cli.start import main as command

        sys.argv[:] = words[1:]
        sys.exit(command())
    if words[0] == "-c":
        name = "<string>"
        text = words[1]
        sys.argv[:] = ["-c", *words[2:]]
    else:
        name = words[0]
        text = Path(words[0]).read_text()
        sys.argv[:] = words
        main.__file__ = words[0]
    exec(compile(text, name, "exec"), vars(main))


def run_forked(words, env=None, cwd=".", timeout=240, **kwargs):
    "Run a `Forked` program to its end, as `subprocess.run` does, with what it prints."
    with Forked(words, env, cwd, **kwargs) as child:
        out, err = child.communicate(timeout)
    return subprocess.CompletedProcess(words, child.returncode, out, err)


class Forked:
    """`python -m rollpipe ...`, `python FILE ...` or `python -c ...` in a process of its own, with the methods of `subprocess.Popen`.

    Its folder is on its search path if `is_on_path`; the signals that are `ignored` are so from the start.
    """

    def __init__(
        self,
        words,
        env=None,
        cwd=".",
        *,
        start_new_session=False,
        is_on_path=True,
        ignored=(),
        n_streams=2,
    ):
        context = (
            SERVER
            if multiprocessing.parent_process() is None
            else multiprocessing.get_context("fork")
        )
        pipes = [context.Pipe(duplex=False) for _ in range(n_streams)]
        self.process = context.Process(
            target=run_program,
            args=(
                [*map(str, words)],
                dict(os.environ if env is None else env),
                os.path.abspath(cwd),
                is_on_path,
                [pipes[0][1], pipes[-1][1]],
                start_new_session,
                ignored,
            ),
        )
        self.process.start()
        self.pid = self.process.pid
        self.stdout, self.stderr = (
            os.fdopen(os.dup(r.fileno()), errors="replace") for r, _ in (pipes[0], pipes[-1])
        )
        for ends in pipes:
            for end in ends:
                end.close()

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout)
        return self.returncode

    def communicate(self, timeout=None):
        "What is left of its output, and of its errors, once it has ended."
        found = {}

        def read(stream):
            found[stream] = stream.read()

        readers = [
            threading.Thread(target=read, args=(stream,), daemon=True)
            for stream in (self.stdout, self.stderr)
            if not stream.closed
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        for stream in (self.stdout, self.stderr):
            stream.close()
        return found.get(self.stdout, ""), found.get(self.stderr, "")

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.wait()
        for stream in (self.stdout, self.stderr):
            stream.close()


class ForkedRun(Forked):
    """A run of an experiment, as `subprocess.Popen` starts it there, with one stream for all that it writes. Several threads wait for it.

    Its interpreter would have the search path of this process: one test shows what comes of this, here it is seen of all commands.

    An exit code can be read once, and a process that starts reads those of all that have ended: so only one thread at a time may do either.
    """

    lock = threading.Lock()

    def __init__(self, command, **_):
        self.code = None
        python = experiments.python_words()
        assert command[: len(python)] == python, command
        with self.lock:
            super().__init__(command[1:], is_on_path=False, n_streams=1)
        self.stderr.close()

    @property
    def returncode(self):
        return self.code

    def wait(self):
        connection.wait([self.process.sentinel])
        with self.lock:
            self.process.join()
            self.code = self.process.exitcode
        return self.code

    def send_signal(self, number):
        if self.code is None:
            os.kill(self.pid, number)


experiments.subprocess = SimpleNamespace(
    **{**vars(subprocess), "Popen": ForkedRun}
)  # here and in forked programs
