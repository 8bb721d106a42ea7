"""What only a cluster has: nodes that fail, room, addresses, and a Ray that is started for one process and leaves nothing behind.

What worker processes promise as well is in `test_contract.py`.
"""
import json
import logging
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import time
from itertools import islice

import numpy as np
import pytest
from gymnasium.spaces import Box
from ray_cases import sigterm_kept, two_nodes
from reference import assert_same, snapshot
from toys import Counting, Lively, Plain, Shaky
from worker_cases import gone, outcome, runs, script, slack

from rollpipe.cli.main import main
from rollpipe.pipes import EnvStepper, FragmentCollector, Lanes, Pipe, RayReading, WorkerError
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.runs.folder import load_run

pytestmark = pytest.mark.timeout(600)
ray = pytest.importorskip("ray")


def fragments(lanes=2): return Lanes(FragmentCollector(EnvStepper(Lively, Shaky()), 3), lanes, 0)
def members(loader): return loader.reading_service.seams[0].coordinator.members


# --- before anything is started

def test_ray_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    error, text, _ = outcome(fragments(), RayReading(1))
    assert isinstance(error, WorkerError) and re.match(r"RayReading: Ray is not installed. Expected pip install 'rollpipe\[ray\]'", text)


@pytest.mark.parametrize("kind", ["nobody", "somebody else", "auto", "auto, one that has ended", "auto, by a variable"])
def test_no_cluster_at_the_address(kind, monkeypatch):
    "It is told at once; Ray itself would try for minutes."
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray._private.services, "find_gcs_addresses", set)      # other tests may have clusters of their own
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        if kind != "somebody else": other.close()
        ended = f"127.0.0.1:{port}" if kind == "auto, one that has ended" else None
        monkeypatch.setattr(ray._private.services, "find_bootstrap_address", lambda folder: ended)
        if kind == "auto, by a variable": monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        begin = time.monotonic()
        error, text, _ = outcome(fragments(), RayReading(1, address="auto" if "auto" in kind else f"127.0.0.1:{port}"))
    assert isinstance(error, WorkerError) and "there is no Ray cluster that can be used" in text and time.monotonic() - begin < 10 * slack()
    assert not ray.is_initialized()


def test_nothing_imports_ray_until_it_is_asked_for(tmp_path):
    process = script(tmp_path, """
import sys
from rollpipe.pipes import RayReading
from rollpipe.settings.config import make_config
RayReading(2, address='10.0.0.7:6379')
print('ray' in sys.modules)
""")
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
    assert (one, three, seqs, kept) == ("1", "3", "[2, 0, 2, 2]", "False") and left == left_then == "[] [] set()"
    for found in (where, where_then): assert set(found.split()) and set(found.split()) <= LOOPBACK
    assert re.fullmatch(r"lane 1: worker 1 \(pid \d+\) on node 127.0.0.1 died \(.*\) while it collected lane 1. "
                        r"Its lanes start anew \(restart 1 of 1\).\n", err), err


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_is_ended_leaves_nothing(sign, start, tmp_path):
    "By Ctrl-C all environments are closed, too; all processes of Ray end soon, also those that Ray leaves to a killed driver."
    (tmp_path/"closed").mkdir()
    process = start(f"""
from rollpipe.agents import ParallelEvaluation
class Tells(Lively):
    def reset(self, **kwargs):
        Path({str(tmp_path)!r}, f'{{os.getpid()}}.made').touch()
        return super().reset(**kwargs)
    def close(self): Path({str(tmp_path/'closed')!r}, str(os.getpid())).touch()
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
        assert len(pids) > 5 and all(map(runs, pids))
        process.send_signal(sign)
        process.communicate(timeout=60)
    assert process.returncode == -sign and gone(pids, 10 * slack()) == []
    if sign == signal.SIGINT: assert len(list((tmp_path/"closed").iterdir())) == 2     # the worker, and who evaluates


# --- a cluster of two nodes

@pytest.fixture(scope="module")
def nodes():
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, two_nodes(folder) as nodes: yield nodes


def test_a_connection_of_the_user_is_used_and_left(nodes):
    with sigterm_kept(): ray.init(nodes.address, log_to_driver=False, logging_level="ERROR")
    try:
        for address in (None, "auto", nodes.address):
            service = RayReading(1, address=address)
            with DataLoader2(fragments(), reading_service=service) as loader: next(iter(loader))
            assert ray.is_initialized()
        error, text, _ = outcome(fragments(), RayReading(1, address="10.0.0.7:6379"))
        assert isinstance(error, WorkerError) and f"Expected address='{nodes.address}', got address='10.0.0.7:6379'" in text
    finally: ray.shutdown()
    with DataLoader2(fragments(), reading_service=RayReading(1, address=nodes.address)) as loader: next(iter(loader))
    assert not ray.is_initialized()


def test_workers_are_where_there_is_what_they_need(nodes, monkeypatch):
    "With what Ray prepares for them. Neither two on a node with room for one, nor anywhere: it is told what was asked, and what is there."
    class Told(Plain):
        def complete(self, act, info): return info | {"x": act * 0 + int(os.environ["OF_THE_WORKER"])}
    pipe = Lanes(FragmentCollector(EnvStepper(Counting, Told()), 2), 2, 0)
    options = dict(address=nodes.address, resources=dict(far=1), runtime_env=dict(env_vars=dict(OF_THE_WORKER="7")))
    with DataLoader2(pipe, reading_service=RayReading(2, **options)) as loader:
        assert [int(f.actor["x"][0]) for f in islice(loader, 2)] == [7, 7]
        assert {member.process.node for member in members(loader)} == {nodes.far.node_id}
    for needs, told in ((dict(far=2), "2 far"), (dict(num_gpus=1), "1 GPU"), (dict(num_cpus=2, far=0.1), "2 CPU, 0.1 far")):
        error, text, _ = outcome(fragments(), RayReading(2, address=nodes.address, resources=needs))
        assert isinstance(error, WorkerError) and re.search(rf"no room for 2 workers.* Expected room for {told} for each worker", text)
        assert text.count("2 CPU") >= 2
    error, text, _ = outcome(fragments(5), RayReading(5, address=nodes.address))     # four CPUs, and one for each worker
    assert isinstance(error, WorkerError) and "no room for 5 workers" in text


def test_placement(nodes):
    "Workers of one CPU each, on nodes of two: on both nodes, or packed on one, where a worker that died starts anew."
    def places(loader): return [member.process.node for member in members(loader)]
    with DataLoader2(fragments(), reading_service=RayReading(2, address=nodes.address)) as loader:
        next(iter(loader))
        assert len({*places(loader)}) == 2
    nodes.wait_until_free()
    with DataLoader2(fragments(), reading_service=RayReading(2, address=nodes.address, placement="pack", restart=1)) as loader:
        items = iter(loader)
        next(items), next(items)
        before = places(loader)
        os.kill(lost := loader.reading_service.health()[1]["pid"], signal.SIGKILL)
        while loader.reading_service.health()[1]["pid"] in (lost, None): next(items)
        assert len({*before, *places(loader)}) == 1


def test_room_that_was_held_is_given_back(nodes):
    "Two workers that need a node each have room in a second iteration, too."
    service = RayReading(2, address=nodes.address, resources=dict(num_cpus=2), placement="pack")
    with DataLoader2(fragments(), reading_service=service) as loader:
        for _ in range(2):
            items = iter(loader)
            next(items), next(items)
            assert len({member.process.node for member in members(loader)}) == 2


class Broken:
    "Can be read in this process, and not in a worker."
    def __reduce__(self): return read, ()


def read():
    if multiprocessing.current_process().name.startswith("worker"): raise ImportError("it is not installed here")
    return Broken()


class Keeps(Pipe):
    def __init__(self, pipe, x):
        super().__init__(pipe)
        self.x = x
    def stream(self, items): yield from items


def test_what_cannot_be_read_on_its_node(nodes):
    "It is told with the traceback from there."
    pipe = Lanes(Keeps(FragmentCollector(EnvStepper(Lively, Shaky()), 3), Broken()), 1, 0)
    error, text, cause = outcome(pipe, RayReading(1, address=nodes.address))
    assert isinstance(error, ImportError) and "not installed here" in text and "in worker 0" in cause and "in read\n" in cause


class Large(Counting):
    "Observations for the object store."
    observation_space = Box(-np.inf, np.inf, (60_000,))
    def look(self): return np.repeat(super().look(), 15_000)


def test_a_training_on_a_cluster(nodes, tmp_path):
    "The weights and evaluations are those of a training on this machine; it can be resumed, and the configuration says where it ran."
    words = ["train", "trpo", "CartPole-v1", "--lanes", "2", "--n-steps", "16", "--n-envs", "2", "--hidden", "8"]
    def train(out, *more):
        assert main([*words, "--steps", "128", "--out", str(tmp_path/out), *more]) == 0
        return load_run(tmp_path/out)
    options = "--workers", "2", "--eval-every", "2"
    here, there = train("here", *options), train("there", *options, "--reading", "ray", "--address", nodes.address)
    assert_same(snapshot(there.agent_state), snapshot(here.agent_state))
    last = [json.loads((tmp_path/out/"metrics.jsonl").read_text().splitlines()[-1]) for out in ("here", "there")]
    assert last[0]["eval_version"] == last[1]["eval_version"] == 2 and last[0]["eval_return_mean"] == last[1]["eval_return_mean"]
    assert main(["train", "--resume", str(tmp_path/"there"), "--steps", "256"]) == 0
    config = json.loads((tmp_path/"there"/"config.json").read_text())
    assert (config["reading"], config["address"], config["workers"], config["steps"]) == ("ray", nodes.address, 2, 256)
    assert load_run(tmp_path/"there").counters["steps"] == 256


def test_a_node_is_lost_with_items_that_were_not_fetched(nodes, caplog):
    "Its lanes start anew on another node, and the log says so. Without `restart` there is an error within seconds."
    pipe = Lanes(FragmentCollector(EnvStepper(Large, Plain()), 5), 2, 0)
    expected = [snapshot(f) for f in islice(pipe, 6)]
    third, options = nodes.add(), dict(address=nodes.address, lag=1, resources=dict(num_cpus=2))     # one worker on a node
    def lose(loader, items):
        "Lose the node of a worker that is not on the first node, with the item that waits in its store."
        found = [next(items), next(items)]
        time.sleep(1)
        lost, node = next((k, n) for k, m in enumerate(members(loader)) for n in (nodes.far, third) if m.process.node == n.node_id)
        nodes.kill(node)
        return found, lost
    with caplog.at_level(logging.WARNING, "rollpipe"), DataLoader2(pipe, reading_service=RayReading(2, restart=1, **options)) as loader:
        items = iter(loader)
        found, lost = lose(loader, items)
        found += [next(items) for _ in range(4)]
    assert [int(f.lane[0]) for f in found] == [0, 1] * 3 and [int(f.seq[0]) for f in found[lost::2]] in ([0, 0, 1], [0, 1, 0])
    for f, known in zip(found[1 - lost::2], expected[1 - lost::2]): assert_same(snapshot(f), known)
    assert re.search(rf"worker {lost} \(pid \d+\) on node .* died \(.*\).*Its lanes start anew \(restart 1 of 1\)", caplog.text)
    with DataLoader2(pipe, reading_service=RayReading(2, **options)) as loader:
        items = iter(loader)
        _, lost = lose(loader, items)
        start = time.monotonic()
        with pytest.raises(WorkerError, match=f"lane {lost}: worker {lost} .* died"): list(islice(items, 20))
    assert time.monotonic() - start < 10 * slack()
    error, text, _ = outcome(pipe, RayReading(2, **options))
    assert isinstance(error, WorkerError) and "no room for 2 workers" in text


class LosesOne:
    "The module `ray` for a worker, except that its next item is lost on the way."
    def __init__(self): self.lost = []
    def __getattr__(self, name): return getattr(ray, name)

    def get(self, answer, **options):
        if self.lost: return ray.get(answer, **options)
        self.lost.append(answer)
        raise ray.exceptions.ObjectLostError(answer.hex(), None, "")


@pytest.mark.parametrize("restart", [0, 1])
def test_an_item_of_a_living_worker_is_lost(restart, nodes, caplog):
    "The worker is ended as if it had died, and its lanes start anew; without `restart` there is an error within seconds."
    with caplog.at_level(logging.WARNING, "rollpipe"), DataLoader2(fragments(), reading_service=RayReading(
            2, lag=1, restart=restart, address=nodes.address)) as loader:
        items = iter(loader)
        next(items), next(items)
        lost, start = members(loader)[1].process, time.monotonic()
        lost.ray = LosesOne()
        if restart:
            found = [(int(f.lane[0]), int(f.seq[0])) for f in islice(items, 8)]
            assert [lane for lane, _ in found] == [0, 1] * 4 and (1, 0) in found
            assert [seq for lane, seq in found if lane == 0] == [1, 2, 3, 4]
            assert re.search(r"worker 1 .* on node .* died \(.*lost.*\).*Its lanes start anew \(restart 1 of 1\)", caplog.text, re.DOTALL)
        else:
            with pytest.raises(WorkerError, match="lane 1: worker 1 .* died"): list(islice(items, 20))
            assert time.monotonic() - start < 10 * slack()
        assert len(lost.ray.lost) == 1 and gone([lost.pid], 10 * slack()) == []
