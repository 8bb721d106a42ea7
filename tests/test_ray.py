"""What only a cluster has: nodes that fail, room, addresses.

What worker processes promise as well is in `test_contract.py`, and a Ray for one process in `test_own_ray.py`.
"""

import json
import logging
import multiprocessing
import os
import re
import signal
import time
from itertools import islice

import numpy as np
import pytest
from gymnasium.spaces import Box
from ray_cases import sigterm_kept
from reference import assert_same, snapshot
from toys import Counting, Lively, Plain, Shaky
from worker_cases import outcome

from rollpipe.cli.main import main
from rollpipe.pipes import EnvStepper, FragmentCollector, Lanes, Pipe, RayReading, WorkerError
from rollpipe.pipes.graph.torchdata import DataLoader2
from rollpipe.runs.folder import load_run

pytestmark = pytest.mark.timeout(600)
ray = pytest.importorskip("ray")


def fragments(lanes=2):
    return Lanes(FragmentCollector(EnvStepper(Lively, Shaky()), 3), lanes, 0)


def members(loader):
    return loader.reading_service.seams[0].coordinator.members


def test_a_connection_of_the_user_is_used_and_left(cluster):
    with sigterm_kept():
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        for address in (None, "auto", cluster.address):
            service = RayReading(1, address=address)
            with DataLoader2(fragments(), reading_service=service) as loader:
                next(iter(loader))
            assert ray.is_initialized()
        error, text, _ = outcome(fragments(), RayReading(1, address="10.0.0.7:6379"))
        assert (
            isinstance(error, WorkerError)
            and f"Expected address='{cluster.address}', got address='10.0.0.7:6379'" in text
        )
    finally:
        ray.shutdown()
    with DataLoader2(fragments(), reading_service=RayReading(1, address=cluster.address)) as loader:
        next(iter(loader))
    assert not ray.is_initialized()


def test_workers_are_where_there_is_what_they_need(cluster, monkeypatch):
    "With what Ray prepares for them. Neither two on a node with room for one, nor anywhere: it is told what was asked, and what is there."

    class Told(Plain):
        def complete(self, act, info):
            return info | {"x": act * 0 + int(os.environ["OF_THE_WORKER"])}

    pipe = Lanes(FragmentCollector(EnvStepper(Counting, Told()), 2), 2, 0)
    options = dict(
        address=cluster.address,
        resources=dict(far=1),
        runtime_env=dict(env_vars=dict(OF_THE_WORKER="7")),
    )
    with DataLoader2(pipe, reading_service=RayReading(2, **options)) as loader:
        assert [int(f.actor["x"][0]) for f in islice(loader, 2)] == [7, 7]
        assert {member.process.node for member in members(loader)} == {cluster.far.node_id}
    for needs, told in (
        (dict(far=2), "2 far"),
        (dict(num_gpus=1), "1 GPU"),
        (dict(num_cpus=2, far=0.1), "2 CPU, 0.1 far"),
    ):
        error, text, _ = outcome(
            fragments(), RayReading(2, address=cluster.address, resources=needs)
        )
        assert isinstance(error, WorkerError) and re.search(
            rf"no room for 2 workers.* Expected room for {told} for each worker", text
        )
        assert text.count("2 CPU") >= 2
    error, text, _ = outcome(
        fragments(5), RayReading(5, address=cluster.address)
    )  # four CPUs, and one for each worker
    assert isinstance(error, WorkerError) and "no room for 5 workers" in text


def test_placement(cluster):
    "Workers of one CPU each, on nodes of two: on both nodes, or packed on one, where a worker that died starts anew."

    def places(loader):
        return [member.process.node for member in members(loader)]

    with DataLoader2(fragments(), reading_service=RayReading(2, address=cluster.address)) as loader:
        next(iter(loader))
        assert len({*places(loader)}) == 2
    cluster.wait_until_free()
    with DataLoader2(
        fragments(),
        reading_service=RayReading(2, address=cluster.address, placement="pack", restart=1),
    ) as loader:
        items = iter(loader)
        next(items), next(items)
        before = places(loader)
        os.kill(lost := loader.reading_service.health()[1]["pid"], signal.SIGKILL)
        while loader.reading_service.health()[1]["pid"] in (lost, None):
            next(items)
        assert len({*before, *places(loader)}) == 1


def test_room_that_was_held_is_given_back(cluster):
    "Two workers that need a node each have room in a second iteration, too."
    service = RayReading(2, address=cluster.address, resources=dict(num_cpus=2), placement="pack")
    with DataLoader2(fragments(), reading_service=service) as loader:
        for _ in range(2):
            items = iter(loader)
            next(items), next(items)
            assert len({member.process.node for member in members(loader)}) == 2


class Broken:
    "Can be read in this process, and not in a worker."

    def __reduce__(self):
        return read, ()


def read():
    if multiprocessing.current_process().name.startswith("worker"):
        raise ImportError("it is not installed here")
    return Broken()


class Keeps(Pipe):
    def __init__(self, pipe, x):
        super().__init__(pipe)
        self.x = x

    def stream(self, items):
        yield from items


def test_what_cannot_be_read_on_its_node(cluster):
    "It is told with the traceback from there."
    pipe = Lanes(Keeps(FragmentCollector(EnvStepper(Lively, Shaky()), 3), Broken()), 1, 0)
    error, text, cause = outcome(pipe, RayReading(1, address=cluster.address))
    assert (
        isinstance(error, ImportError)
        and "not installed here" in text
        and "in worker 0" in cause
        and "in read\n" in cause
    )


class Large(Counting):
    "Observations for the object store."

    observation_space = Box(-np.inf, np.inf, (60_000,))

    def look(self):
        return np.repeat(super().look(), 15_000)


def test_a_training_on_a_cluster(cluster, tmp_path):
    "The weights and evaluations are those of a training on this machine; it can be resumed, and the configuration says where it ran."
    words = "train trpo CartPole-v1 --lanes 2 --n-steps 16 --n-envs 2 --hidden 8 --steps 128"
    options = " --workers 2 --eval-every 2"

    def train(out, more=""):
        assert main([*(words + options + more).split(), "--out", str(tmp_path / out)]) == 0
        return load_run(tmp_path / out)

    here = train("here")
    there = train("there", f" --reading ray --address {cluster.address}")
    assert_same(snapshot(there.agent_state), snapshot(here.agent_state))
    last = [
        json.loads((tmp_path / out / "metrics.jsonl").read_text().splitlines()[-1])
        for out in ("here", "there")
    ]
    assert (
        last[0]["eval_version"] == last[1]["eval_version"] == 2
        and last[0]["eval_return_mean"] == last[1]["eval_return_mean"]
    )
    assert main(["train", "--resume", str(tmp_path / "there"), "--steps", "256"]) == 0
    config = load_run(tmp_path / "there").config
    assert (config["reading"], config["address"], config["workers"], config["steps"]) == (
        "ray",
        cluster.address,
        2,
        256,
    )
    assert load_run(tmp_path / "there").counters["steps"] == 256


def test_a_node_is_lost_with_items_that_were_not_fetched(cluster, caplog):
    "Its lanes start anew on another node, and the log says so."
    pipe = Lanes(FragmentCollector(EnvStepper(Large, Plain()), 5), 2, 0)
    expected = [snapshot(f) for f in islice(pipe, 6)]
    # Two nodes of this test alone, each with room for both workers, of which each has one. What other tests need is not lost.
    own_nodes = [cluster.add(mine=2), cluster.add(mine=2)]
    options = dict(address=cluster.address, lag=1, resources=dict(mine=1), restart=1)
    try:
        with (
            caplog.at_level(logging.WARNING, "rollpipe"),
            DataLoader2(pipe, reading_service=RayReading(2, **options)) as loader,
        ):
            items = iter(loader)
            found = [next(items), next(items)]
            time.sleep(1)

            # Lose the node of the first worker, with the item that waits in its store.
            lost = 0
            lost_node = members(loader)[lost].process.node
            cluster.kill(next(node for node in own_nodes if node.node_id == lost_node))
            found += [next(items) for _ in range(4)]
            assert members(loader)[lost].process.node != lost_node
    finally:
        for node in own_nodes:
            cluster.kill(node)

    assert [int(f.lane[0]) for f in found] == [0, 1] * 3
    assert [int(f.seq[0]) for f in found[lost::2]] in ([0, 0, 1], [0, 1, 0])
    for f, known in zip(found[1 - lost :: 2], expected[1 - lost :: 2]):
        assert_same(snapshot(f), known)
    told = rf"worker {lost} \(pid \d+\) on node .* died \(.*\).*Its lanes start anew \(restart 1 of 1\)"
    assert re.search(told, caplog.text)
