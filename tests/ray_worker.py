"""Starts a worker of the cluster in `ray_cases`, in place of Ray's `setup_worker.py`: a process forks it that has imported torch.

To start an interpreter and to import torch, Ray and rollpipe takes three seconds of processor time for each worker. This script imports
nothing of them: it sends its words, variables and streams to the server, and waits for the end of the worker.
"""

import json
import os
import runpy
import signal
import socket
import sys
from importlib import import_module


def main():
    "Ask the server for a worker, as the script that Ray starts."
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(os.environ["RAY_CASES_SERVER"])
        socket.send_fds(link, [b"."], [1, 2])
        link.sendall(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode())
        link.shutdown(socket.SHUT_WR)
        link.recv(1)


def serve(address, env):
    "Fork workers, until this process is ended."
    os.environ.update(env)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for name in ("google.protobuf.internal.builder", "jsonschema", "requests", "yaml"):
        import_module(name)  # half of what Ray imports
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen(16)
        while True:
            link, _ = door.accept()
            with link:
                _, streams, _, _ = socket.recv_fds(link, 1, 2)
                if not os.fork():
                    door.close()
                    with link.makefile("rb") as message:
                        work(streams, *json.load(message))  # the link is open until the worker ends
                    os._exit(0)
                for stream in streams:
                    os.close(stream)


def work(streams, words, env, folder):
    "In the child: become the worker with these words and variables."
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    # Not before: an imported Ray has read its variables, and a worker without its own among them does not start.
    from ray._private.runtime_env.context import RuntimeEnvContext, update_envs
    from ray._private.workers import setup_worker

    options, words = setup_worker.parser.parse_known_args(words)
    update_envs(
        RuntimeEnvContext.deserialize(options.serialized_runtime_env_context or "{}").env_vars
    )
    sys.path[:0] = [
        path
        for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if path and path not in sys.path
    ]
    sys.argv[:] = words
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
