"A Ray that is started for one process, and what is told before anything is started. What a cluster promises is in `test_ray.py`."

import re
import signal
import socket
import sys
import tempfile
import time

import pytest
from toys import Lively, Shaky
from worker_cases import gone, outcome, runs, script, slack

from rollpipe.pipes import EnvStepper, FragmentCollector, Lanes, RayReading, WorkerError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ray = pytest.importorskip("ray")


def fragments():
    return Lanes(FragmentCollector(EnvStepper(Lively, Shaky()), 3), 2, 0)


# --- before anything is started


def test_ray_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    error, text, _ = outcome(fragments(), RayReading(1))
    assert isinstance(error, WorkerError) and re.match(
        r"RayReading: Ray is not installed. Expected pip install 'rollpipe\[ray\]'", text
    )


@pytest.mark.parametrize(
    "kind", ["nobody", "somebody else", "auto", "auto, one that has ended", "auto, by a variable"]
)
def test_no_cluster_at_the_address(kind, monkeypatch):
    "It is told at once; Ray itself would try for minutes."
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(
        ray._private.services, "find_gcs_addresses", set
    )  # other tests may have clusters of their own
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        if kind != "somebody else":
            other.close()
        ended = f"127.0.0.1:{port}" if kind == "auto, one that has ended" else None
        monkeypatch.setattr(ray._private.services, "find_bootstrap_address", lambda folder: ended)
        if kind == "auto, by a variable":
            monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        begin = time.monotonic()
        error, text, _ = outcome(
            fragments(), RayReading(1, address="auto" if "auto" in kind else f"127.0.0.1:{port}")
        )
    assert (
        isinstance(error, WorkerError)
        and "there is no Ray cluster that can be used" in text
        and time.monotonic() - begin < 10 * slack()
    )
    assert not ray.is_initialized()


def test_nothing_imports_ray_until_it_is_asked_for(tmp_path):
    process = script(
        tmp_path,
        """
import sys
from rollpipe.pipes import RayReading
from rollpipe.settings.config import make_config
RayReading(2, address='10.0.0.7:6379')
print('ray' in sys.modules)
""",
    )
    out, err = process.communicate(timeout=120)
    assert (out, err) == ("False\n", "")


# --- a Ray of its own

BEGIN = """
import os, socket, sys, time
from itertools import islice
from pathlib import Path
from conftest import command_of
from toys import Lively, Shaky
from rollpipe.pipes import EnvStepper, FragmentCollector, Lanes, RayReading
from rollpipe.pipes.cluster.door import descendants
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.runs.folder import load_run

def ports(pids):
    "The addresses at which these processes listen, as hexadecimal numbers."
    sockets = set()
    for pid in pids:
        for file in Path(f'/proc/{pid}/fd').glob('*'):
            try: sockets.add(os.readlink(file))
            except OSError: pass
    rows = [row.split() for kind in ('tcp', 'tcp6') for row in Path(f'/proc/net/{kind}').read_text().splitlines()[1:]]
    return {row[1].split(':')[0] for row in rows if row[3] == '0A' and f'socket:[{row[9]}]' in sockets}

def others(): return [pid for pid in descendants(os.getpid()) if b'rollpipe guard' not in command_of(pid)]
pipe = Lanes(FragmentCollector(EnvStepper(Lively, Shaky()), 3), 4, 0)
"""

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.fixture
def start(tmp_path, monkeypatch):
    "Start a program with a home, and with a folder for Ray that has a short name."
    monkeypatch.setenv("HOME", str(tmp_path))
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield lambda text: script(tmp_path, BEGIN + text)


def test_a_ray_of_its_own(start):
    "From 1 to 3 workers between two iterations, with a death: only the loopback interface, a silent console, and nothing is left."
    process = start("""
settings = dict(os.environ)
expected = [f.state.obs for f in islice(pipe, 8)]
for n in (1, 3):
    with DataLoader2(pipe, reading_service=RayReading(n, restart=1)) as loader:
        items = iter(loader)
        for obs in expected: assert (next(items).state.obs == obs).all()
        print(len({state['pid'] for state in loader.reading_service.health()}))
        print(*ports([os.getpid(), *others()]))
        if n == 3:
            os.kill(loader.reading_service.health()[1]['pid'], 9)
            print([int(next(items).seq) for _ in range(4)])
            time.sleep(1)     # for what Ray might say
    print(others(), os.listdir(os.environ['TMPDIR']), {k for k in {*settings, *os.environ} if settings.get(k) != os.environ.get(k)})
print(Path('~/.ray').expanduser().exists())
""")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    one, where, left, three, where_then, seqs, left_then, kept = out.splitlines()
    assert (one, three, seqs, kept) == (
        "1",
        "3",
        "[2, 0, 2, 2]",
        "False",
    ) and left == left_then == "[] [] set()"
    for found in (where, where_then):
        assert set(found.split()) and set(found.split()) <= LOOPBACK
    assert re.fullmatch(
        r"lane 1: worker 1 \(pid \d+\) on node 127.0.0.1 died \(.*\) while it collected lane 1. "
        r"Its lanes start anew \(restart 1 of 1\).\n",
        err,
    ), err


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_is_ended_leaves_nothing(sign, start, tmp_path):
    "By Ctrl-C all environments are closed, too; all processes of Ray end soon, also those that Ray leaves to a killed driver."
    (tmp_path / "closed").mkdir()
    process = start(f"""
from rollpipe.agents import ParallelEvaluation
class Tells(Lively):
    def reset(self, **kwargs):
        Path({str(tmp_path)!r}, f'{{os.getpid()}}.made').touch()
        return super().reset(**kwargs)
    def close(self): Path({str(tmp_path / "closed")!r}, str(os.getpid())).touch()
pipe = Lanes(FragmentCollector(EnvStepper(lambda: Tells(), Shaky()), 3), 2, 0)
with ParallelEvaluation(lambda: Tells(), Shaky(), 10 ** 6, ray={{}}) as evaluation:
    evaluation.request()
    while not list(Path({str(tmp_path)!r}).glob('*.made')): evaluation.wait(0.1)
    with DataLoader2(pipe, reading_service=RayReading(1, lag=1)) as loader:
        for k, _ in enumerate(loader):
            if k == 1: print(*others(), flush=True)
""")
    with process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert pids, process.stderr.read()  # it has ended
        assert len(pids) > 5 and all(map(runs, pids))
        process.send_signal(sign)
        process.communicate(timeout=60)
    assert process.returncode == -sign and gone(pids, 10 * slack()) == []
    if sign == signal.SIGINT:
        assert len(list((tmp_path / "closed").iterdir())) == 2  # the worker, and who evaluates
