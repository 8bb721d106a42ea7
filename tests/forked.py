"""Programs in processes of their own, which a server forks that has imported torch and rollpipe: to start an interpreter takes seconds.

Tests that look at the start itself, at its imports or at its search path use `subprocess`.
"""
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import types
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import torch

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch._dynamo", "gymnasium.envs.classic_control", "rollpipe.agents.learner", "rollpipe.cli.main"])


def ensure_running():
    "Start the server, if there is none. It lives as long as this process."
    forkserver.ensure_running()


def run_program(words, env, folder, is_on_path, streams, in_session, ignored):
    "In the child: become `python` with these words."
    if in_session: os.setsid()
    for number, stream in enumerate(streams, 1): os.dup2(stream.fileno(), number)
    for number in ignored: signal.signal(number, signal.SIG_IGN)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = dict.fromkeys([*[folder] * is_on_path, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *sys.path])
    np.random.seed()     # as in a process that has just begun
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", 1)))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[:2] == ["-m", "rollpipe"]:
        from rollpipe.cli.start import main as command
        sys.argv[:] = words[1:]
        sys.exit(command())
    if words[0] == "-c": name, text, sys.argv[:] = "<string>", words[1], ["-c", *words[2:]]
    else: name, text, sys.argv[:], main.__file__ = words[0], Path(words[0]).read_text(), words, words[0]
    exec(compile(text, name, "exec"), vars(main))


def run_forked(words, env=None, cwd=".", timeout=240, **kwargs):
    "Run a `Forked` program to its end, as `subprocess.run` does, with what it prints."
    with Forked(words, env, cwd, **kwargs) as child: out, err = child.communicate(timeout)
    return subprocess.CompletedProcess(words, child.returncode, out, err)


class Forked:
    """`python -m rollpipe ...`, `python FILE ...` or `python -c ...` in a process of its own, with the methods of `subprocess.Popen`.

    Its folder is on its search path if `is_on_path`; the signals that are `ignored` are so from the start.
    """
    def __init__(self, words, env=None, cwd=".", *, start_new_session=False, is_on_path=True, ignored=()):
        pipes = [SERVER.Pipe(duplex=False) for _ in range(2)]
        self.process = SERVER.Process(target=run_program, args=(
            [*map(str, words)], dict(os.environ if env is None else env), os.path.abspath(cwd), is_on_path, [w for _, w in pipes],
            start_new_session, ignored))
        self.process.start()
        self.pid = self.process.pid
        self.stdout, self.stderr = (os.fdopen(os.dup(r.fileno()), errors="replace") for r, _ in pipes)
        for ends in pipes:
            for end in ends: end.close()

    @property
    def returncode(self): return self.process.exitcode

    def poll(self): return self.returncode

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.returncode is None: raise subprocess.TimeoutExpired("a forked program", timeout)
        return self.returncode

    def communicate(self, timeout=None):
        "What is left of its output, and of its errors, once it has ended."
        found = {}
        def read(stream): found[stream] = stream.read()
        readers = [threading.Thread(target=read, args=(stream,), daemon=True) for stream in (self.stdout, self.stderr) if not stream.closed]
        for reader in readers: reader.start()
        self.wait(timeout)
        for reader in readers: reader.join(timeout)
        for stream in (self.stdout, self.stderr): stream.close()
        return found.get(self.stdout, ""), found.get(self.stderr, "")

    def send_signal(self, number):
        if self.poll() is None: os.kill(self.pid, number)

    def kill(self): self.send_signal(signal.SIGKILL)

    def __enter__(self): return self

    def __exit__(self, *_):
        self.kill()
        self.wait()
        for stream in (self.stdout, self.stderr): stream.close()
