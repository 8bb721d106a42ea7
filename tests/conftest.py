"""Every test runs on one thread, with fixed seeds, and must leave no process, no shared memory and no signal handler behind."""

import gc
import importlib.util
import multiprocessing
import os
import platform
import random
import re
import signal
import tempfile
import time
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

import forked  # noqa: F401  # before a test: says what the server imports that forks processes, and makes forks of the runs of experiments
import numpy as np
import pytest
import torch

from rollpipe.traces.fingerprint import version_of_package

torch.set_num_threads(1)
signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # processes started in the background ignore it, with their children
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and those of nohup ignore this one
SHM = Path("/dev/shm")
HELPERS = (
    b"resource_tracker",
    b"forkserver",
    b"torch_shm_manager",
)  # these live as long as the interpreter, by design


ON_THE_CLUSTER = {"test_contract", "test_evaluation_contract", "test_ray"}
LONG = {
    f"test_{name}"
    for name in (
        "bench",
        "cli",
        "device",
        "docs",
        "engines",
        "experiments",
        "export_policy",
        "fault_matrix",
        "faults",
        "fusion",
        "infos",
        "laws_of_envs",
        "laws_of_learners",
        "laws_of_networks",
        "laws_of_pipes",
        "local_crew",
        "own_ray",
        "parallel_evaluation",
        "ranks",
        "reading",
        "resumable",
        "signals",
        "torchrun",
        "tune",
    )
}


NAMED_PACKAGES = ("torch", "torchdata", "gymnasium", "numpy", "optree", "onnxruntime")


def versions():
    "Python and the packages that the results depend on most, with their versions, in one line."
    packages = (f"{name} {version_of_package(name)}" for name in NAMED_PACKAGES)
    return ", ".join((f"python {platform.python_version()}", *packages))


def pytest_terminal_summary(terminalreporter):
    "The versions stand above the counts. `pytest -q` prints no header in which they could stand."
    terminalreporter.write_line(f"versions: {versions()}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What needs the cluster is slow, and is left to `make thorough`. So are all cases but the first
    of a test that is marked `slow_but_one`.

    The files that take longest come first: then the short ones keep all processes of xdist busy until the end.
    """
    seen = set()
    for item in items:
        function = item.path, item.parent.name, getattr(item, "originalname", item.name)
        is_further_case = item.get_closest_marker("slow_but_one") and function in seen
        if is_further_case or "cluster" in item.fixturenames:
            item.add_marker("slow")
        seen.add(function)
    items.sort(key=lambda item: (item.path.stem not in ON_THE_CLUSTER, item.path.stem not in LONG))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    "Each process of xdist takes a file at a time, or all files of the cluster."
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "the cluster" if Path(file).stem in ON_THE_CLUSTER else file

    return Files(config, log)


STARTED = ExitStack()
CLUSTER = []


@pytest.fixture(scope="module")
def cluster():
    "A Ray cluster of two nodes. Its files run one after the other and share it, as it takes seconds to start one."
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    from ray_cases import two_nodes

    if not CLUSTER:
        STARTED.callback(CLUSTER.clear)
        folder = STARTED.enter_context(tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp"))
        CLUSTER.append(STARTED.enter_context(two_nodes(folder)))
    return CLUSTER[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem):
    "The cluster ends with the last of its tests, or with the session."
    if nextitem is None or nextitem.path.stem not in ON_THE_CLUSTER:
        STARTED.close()


def pytest_sessionfinish():
    STARTED.close()


def pytest_collection():
    "Nothing of what collecting thousands of tests makes is garbage."
    gc.disable()


def pytest_collection_finish():
    "What is there before the first test stays: looking for what a test has left collects garbage often, and so do forked workers."
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def what_other_files_left():
    "Looking for garbage passes over it: some tests look hundreds of times, which takes a second each time at the end of a long run."
    gc.freeze()


# `torch.manual_seed` prepares the seeds of all accelerators, which takes it a millisecond.
seed_torch = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def seeds():
    "Every test starts from the same global random state, whatever ran before it."
    random.seed(0)
    np.random.seed(0)
    seed_torch(0)


@pytest.fixture(scope="session")
def functions_of_onnx():
    "To write ONNX, torch reads the source of 500 functions, which takes it a second. Here it reads them once."
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    except ImportError:  # an old torch, or one without onnxscript
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib))
        )
        yield


@pytest.fixture(scope="session")
def gallery(tmp_path_factory):
    "Small runs that are trained once in a session: `gallery.copy(name, folder)`."
    from gallery import Gallery, home_of  # with the trainings, which few tests need

    return Gallery(home_of(tmp_path_factory))


@pytest.fixture
def packages(monkeypatch):
    "Processes that the test starts find the packages that this one finds."
    from command_line import settings  # with the command line, which few tests need

    for name, value in settings().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def nothing_stays_open():
    "The test closes the environments that it makes."
    from toys import Ledger

    Ledger.clear()
    yield
    if Ledger.open():
        gc.collect()
    assert Ledger.open() == 0


def _reactions():
    return [
        signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ], signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.fixture(autouse=True)
def no_signal_handlers():
    "The test leaves the reactions to signals as they were. An ignored signal would be ignored by every process that a later test starts."
    before = _reactions()
    yield
    assert _reactions() == before, "a reaction to a signal was left behind"


def started_by(pid):
    """Numbers of the processes that process `pid` has started, on systems with /proc.

    The kernel lists those of each thread. A thread or a process that ends meanwhile may hide others, so two lists in a row must be equal.
    """

    def listed():
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                yield from map(int, file.read_text().split())

    found = {*listed()}
    before = None
    while found != before:
        found, before = {*listed()}, found
    return found


def _children():
    "Child processes of this one; multiprocessing's own helpers are left out."
    multiprocessing.active_children()  # reaps those that have ended
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()  # there is none, as after most tests
    return {p for p in started_by(os.getpid()) if not any(h in command_of(p) for h in HELPERS)}


def command_of(pid):
    "The command line of a process. One that has ended in the meantime counts as a helper."
    try:
        for _ in range(
            1000
        ):  # a process that has just been spawned has no command line for a moment; one that has ended has none at all
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if (
                command
                or Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in b"ZX"
            ):
                break
        return command
    except OSError:
        return HELPERS[0]


def _alive(pid):
    return Path(f"/proc/{pid}").exists()


def _segments(owners=None):
    "Names of shared-memory segments; with `owners`, only those made by one of these processes, or by a process that has ended."
    names = {p.name for p in SHM.iterdir()} if SHM.is_dir() else set()
    if owners is None:
        return names

    def ours(name):
        if name.startswith("sem.mp-"):
            return False  # its random letters may look like the number of a process
        pids = {int(d) for d in re.findall(r"(?<=_)\d+(?=_)", name)}
        return any(p in owners or not _alive(p) for p in pids)

    return {n for n in names if ours(n)}


@pytest.fixture(autouse=True)
def no_leftovers():
    "After the test there is no child process and no shared-memory segment that was not there before."
    children = _children()
    segments = _segments()
    yield
    deadline = time.monotonic() + 5
    while True:  # a process that was told to end may need a moment
        left = _children() - children, _segments({os.getpid()}) - segments
        if not any(left) or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    assert not left[0], f"child processes left behind: { {p: command_of(p) for p in left[0]} }"
    assert not left[1], f"shared-memory segments left behind: {left[1]}"
