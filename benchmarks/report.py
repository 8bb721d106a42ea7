"""Parts of the output that all benchmarks share: the machine, the versions, the command, and medians with their spread."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch


def options_of(doc: str, **defaults: Any) -> argparse.ArgumentParser:
    """A parser of the options of a benchmark.

    Args:
        doc: text of `--help`
        **defaults: option -> its default, which has the option's type; a list is for an option with several values
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, x in defaults.items():
        many = isinstance(x, list)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(x[0] if many else x),
            default=x,
            nargs="+" if many else None,
        )
    return parser


def begun(parser: argparse.ArgumentParser) -> argparse.Namespace:
    "The options from the command line, with one thread for torch and the header printed."
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(header())
    return args


def runs_of(commands: list, words: list, repeats: int) -> list:
    "What the runs of each command with these `words` print as JSON. They alternate, each in a new process; repeat number i has seed i."
    runs = [[] for _ in commands]
    for seed in range(repeats):
        for command, results in zip(commands, runs):
            command = [*map(str, (*command, *words, "--seed", seed))]
            out = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            if out.returncode:
                raise SystemExit(f"failed: {' '.join(command)}")
            results.append(json.loads(out.stdout.splitlines()[-1]))
    return runs


def processor() -> str:
    "The processor's name, if the system gives it."
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":")[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def header(packages=("torch", "torchdata", "gymnasium", "numpy", "rollpipe")) -> str:
    "Machine, versions and command, as Markdown."
    versions = ", ".join(
        f"{p} {version(p)}" for p in packages if find_spec(p)
    )  # torchdata ends with Python 3.12
    command = " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    return (
        f"Machine: {processor()}, {os.cpu_count()} cores; Python {platform.python_version()}; {versions}.  \n"
        f"Command: `python {command}`\n"
    )


def spread(values, form="{:.2f}") -> str:
    "Median and range of repeats: `1.02 (0.99-1.05)`."
    return f"{form.format(statistics.median(values))} ({form.format(min(values))}-{form.format(max(values))})"


def table(head, rows) -> str:
    "A Markdown table."
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
