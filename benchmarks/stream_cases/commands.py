"What the command line leaves in its folder, with the defaults of each algorithm."

import inspect
import json
import math
import os
import tempfile
from pathlib import Path

from safetensors.torch import load_file

from rollpipe.cli.main import main
from rollpipe.pipes import rollouts


def _config(run):
    "The configuration that holds in the end. Runs of before have it in one file, today it is a fold."
    try:
        from rollpipe.traces.history import config_at
    except ImportError:
        return json.loads((run / "config.json").read_text())
    return config_at(run, math.inf)


def _run(*commands):
    "What lies in the folder `run` after some `rollpipe` commands; times are left out."
    with tempfile.TemporaryDirectory() as folder:
        before = os.getcwd()
        os.chdir(folder)
        try:
            for command in commands:
                yield f"exit code of {command.replace(ENGINE, '')}", main(command.split())
        finally:
            os.chdir(before)
        run = Path(folder, "run")
        if not run.exists():
            return  # the exit code is part of the record
        config = _config(run)
        new = (
            "optimize",
            "engine",
            "precondition",
            "cg_gain",
            "recurrent",
            "state_size",
            "span",
            "past",
            "episode_seeds",
            "n_sampled_goal",
            "shared",
            "frames",
            "average_policy",
            "network",
            "critic_network",
            "sees",
            "critic_sees",
            "lr_kl",
        )
        for option in new:
            config["options"].pop(option, None)
        for name in (
            "exact",
            "kept",
            "inexact",
            "record",
            "record_limit",
            "stop_at_return",
            "patience",
            "stop_after",
            "info",
        ):
            config.pop(name, None)  # they are new, too
        for name in (
            "keep",
            "video_every",
            "device",
            "preset",
            "of_preset",
            "origins",
            "eval_episodes",
            "final_episodes",
        ):
            config.pop(name, None)
        yield "config", config
        for k, line in enumerate((run / "metrics.jsonl").read_text().splitlines()):
            yield (
                f"record {k}",
                {
                    name: x
                    for name, x in json.loads(line).items()
                    if "seconds" not in name and "_per_s" not in name
                },
            )
        weights = load_file(run / "checkpoint.safetensors")
        yield (
            "weights",
            {name: x for name, x in weights.items() if not name.startswith("stream.")},
        )  # the state of the stream is new


ENGINE = (
    " --engine torch" if "engine" in inspect.signature(rollouts).parameters else ""
)  # ONNX Runtime has other last bits


def _train(algorithm, env="CartPole-v1"):
    return _run(f"train {algorithm} {env} --steps 1k --seed 0 --out run{ENGINE}")


def trpo():
    yield from _train("trpo", "Pendulum-v1")


def npg():
    yield from _train("npg")


def reinforce():
    yield from _train("reinforce")


def a2c():
    yield from _train("a2c")


def ppo():
    yield from _train("ppo")


def vtrace():
    yield from _train("vtrace")


def dqn():
    yield from _train("dqn")


def workers():
    yield from _run(
        "train ppo CartPole-v1 --steps 1k --seed 0 --lanes 2 --n-steps 32 --workers 2 --lag 1 --out run"
        + ENGINE
    )


def resumed():
    yield from _run(
        "train a2c CartPole-v1 --steps 500 --seed 0 --out run" + ENGINE,
        "train --resume run --steps 1k",
    )
