"""The cases of `same_stream.py`: each module is a group, each function in it that needs no arguments is a case.

A case is a generator function without parameters. It yields pairs of a label and a container: batches, metrics, weights. Every leaf
is recorded by its path, its form (dtype and shape) and the sha256 of its bytes. Cases use only the public names of README and tutorials.
"""

import importlib
import inspect
import json
import random
import re
import sys
import traceback
import types
from pathlib import Path

import numpy as np
import torch

# Old name -> new name, of fields, infos, metrics, classes, functions and options. Cases use the new names; `REV` is asked for the old ones,
# and a path or a message of `REV` that has the old name counts as one with the new. Options go through `tools.named`.
RENAMED: dict = {}
# New module -> old module, of those that the cases import. `REV` is asked for the old one.
MOVED: dict = {
    "cli.main": "cli",
    "pipes.data.fragment_ops": "pipes.fragment_ops",
    "pipes.graph.modules": "pipes.modules",
    "pipes.graph.torchdata": "pipes.torchdata",
}
# Old phrase -> new phrase, of messages that were reworded on purpose.
REWORDED: dict = {
    "an id of gymnasium's registry, got": "an id of gymnasium's registry; or one of your own, which a module registers "
    "(`gymnasium.register`) that is imported first: `import MODULE`, `--import MODULE`, or the id 'MODULE:NoSuchEnv-v0', got",
    "wrong action. Expected shape [B] of Discrete": "wrong action. Expected integers or bools of shape [B] of Discrete",
}
# New fields, of which `REV` knows nothing. Where one of them is None, that is no difference.
ADDED: tuple = (
    "config['max_episode_steps']",
    "restarts",
    *(f"config['options']['{name}']" for name in ("action_mask", "reward_scale")),
)
# The groups, by the processes in which they run.
PROCESSES = (
    ("gradients", "replay", "commands"),
    ("streams", "episodes", "vector", "transforms", "faults"),
    ("fork",),
    ("spawn",),
)


def _compare():
    "`rollpipe.pipes.data.nested` of this working tree, whichever package the cases run against."
    # A package of its own, because the module imports its neighbours.
    package = types.ModuleType("compared")
    package.__path__ = [str(Path(__file__).resolve().parents[2] / "rollpipe/pipes/data")]
    sys.modules["compared"] = package
    return importlib.import_module("compared.nested")


compare = _compare()
leaf = compare.leaf
leaves = compare.leaf_digests


def record(case) -> dict:
    "`dict(leaves=...)` of a case, or `dict(error=..., trace=...)` if it failed."
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    found = []
    try:
        for label, tree in case():
            found += leaves(label, tree)
        if len({path for path, *_ in found}) < len(found):
            raise ValueError("two leaves have the same path")
    except Exception as e:
        return dict(error=f"{type(e).__name__}: {e}", trace=traceback.format_exc())
    return dict(leaves=found) if found else dict(error="the case yielded nothing", trace="")


def cases(group) -> dict:
    "The cases of a group by their names, `group.case`."
    module = importlib.import_module(f"{__name__}.{group}")
    found = {
        name: f
        for name, f in vars(module).items()
        if inspect.isgeneratorfunction(f) and not name.startswith("_")
    }
    return {f"{group}.{name}": f for name, f in found.items() if f.__module__ == module.__name__}


def is_wanted(name, only) -> bool:
    "Whether this case or its group was asked for; all are, if none was named."
    return not only or any(re.fullmatch(rf"{re.escape(wanted)}(\..*)?", name) for wanted in only)


def move():
    "Let the modules of an old package be imported by their new names, too."
    for new, old in MOVED.items():
        try:
            importlib.import_module(f"rollpipe.{new}")
        except ModuleNotFoundError:
            sys.modules[f"rollpipe.{new}"] = importlib.import_module(f"rollpipe.{old}")


def rename(package):
    "Add the new names to the public modules of an old package, beside the old ones."
    for module in map(
        importlib.import_module, (f"{package}.pipes", f"{package}.layers", f"{package}.agents")
    ):
        for old, new in RENAMED.items():
            if hasattr(module, old) and not hasattr(module, new):
                setattr(module, new, getattr(module, old))


def run(root, out, groups, only):
    "Write a line of JSON for each case of the groups, run against the package in the folder `root`, to the file `out`."
    import rollpipe

    if Path(root).resolve() not in Path(rollpipe.__file__).resolve().parents:
        sys.exit(f"rollpipe was imported from {rollpipe.__file__}, and not from {root}")
    move()
    rename("rollpipe")
    torch.set_num_threads(1)
    with open(out, "w") as file:
        for name, case in (item for group in groups for item in cases(group).items()):
            if is_wanted(name, only):
                print(json.dumps({name: record(case)}), file=file, flush=True)
