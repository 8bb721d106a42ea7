"A Ray cluster of two nodes on this machine, whose workers find the modules of the tests."

import os
import secrets
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import ray_worker
from forked import SERVER
from worker_cases import environment

from rollpipe.pipes.cluster.door import _read_settings, lease

SETTINGS = dict(
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
    RAY_AUTH_MODE="token",
    RAY_AUTH_TOKEN=secrets.token_hex(32),
    RAY_worker_niceness="0",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_health_check_initial_delay_ms="500",
    RAY_health_check_period_ms="500",
    RAY_health_check_timeout_ms="1000",
    RAY_health_check_failure_threshold="3",
)
NODE = dict(
    num_cpus=2, object_store_memory=2 * 10**8, setup_worker_path=ray_worker.__file__
)  # [bytes]
# From Python 3.13 on, a process that multiprocessing forks drops the functions for its exit. Those of Ray may be the last that know a node,
# whose connections can only be closed in the process that opened them: the child would crash.
NODES: list = []


@contextmanager
def sigterm_kept():
    "Put the handler back for which Ray has one of its own."
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class TwoNodes:
    "The nodes; the first one is that of this process, and `address` is where others find them."

    def __init__(self, cluster, folder):
        self.cluster = cluster
        self.address = cluster.address
        self.folder = Path(folder)

    def add(self, **resources):
        with sigterm_kept():
            node = self.cluster.add_node(**NODE, resources=resources)
        NODES.append(node)
        return node

    def wait_until_free(self, seconds=30):
        "A node tells only some time after the end of a worker that what it held is free. Until then it may have no room for all others."
        import ray

        user = type("User", (), {})()
        release = lease(self.address, user)
        try:
            until = time.monotonic() + seconds
            while (free := ray.available_resources().get("CPU", 0)) < (
                all_of_them := ray.cluster_resources()["CPU"]
            ):
                assert time.monotonic() < until, f"{free} of {all_of_them} CPUs are free"
                time.sleep(0.1)
        finally:
            release()

    @staticmethod
    def kill(node):
        "End a node as if its machine had failed. A node that has ended stays so."
        for kind, processes in node.all_processes.items():
            if "raylet" not in kind:
                continue
            raylet = processes[0].process
            raylet.kill()
            raylet.wait(10)


@contextmanager
def two_nodes(folder):
    "Start a cluster with two CPUs on each of two nodes, the second of which has two `far`; sessions are kept in `folder`."
    before = dict(os.environ)
    door = f"{folder}/server"
    os.environ.update(
        SETTINGS,
        RAY_TMPDIR=str(folder),
        PYTHONPATH=environment()["PYTHONPATH"],
        RAY_CASES_SERVER=door,
    )
    server = SERVER.Process(target=ray_worker.serve, args=(door, dict(os.environ)))
    server.start()
    import ray
    from ray.cluster_utils import Cluster

    _read_settings(ray)
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = (
        False  # as the variable says; Ray may be imported already
    )
    with sigterm_kept():
        cluster = Cluster(initialize_head=True, head_node_args=dict(NODE, include_dashboard=False))
    try:
        NODES.append(cluster.head_node)
        nodes = TwoNodes(cluster, folder)
        nodes.far = nodes.add(far=2)
        cluster.wait_for_nodes()
        yield nodes
    finally:
        ray.shutdown()
        cluster.shutdown()
        server.kill()
        server.join()
        os.environ.clear()
        os.environ.update(before)
