"""Reinforcement learning in which a pipeline of datapipes collects the rollouts.

Here are the names that a first program needs. The subpackages `rollpipe.pipes`, `layers`, `agents`,
`testing` and `runs` have the others.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0"
__all__ = [
    "A2C",
    "ActionCritic",
    "AdvantageBuffer",
    "Critic",
    "DQN",
    "DataLoader2",
    "EnvStepper",
    "FragmentCollector",
    "FragmentStacker",
    "Lanes",
    "MLPPolicy",
    "PPO",
    "ProcessReading",
    "QPolicy",
    "RayReading",
    "RecurrentPolicy",
    "SAC",
    "SquashedPolicy",
    "TRPO",
    "check_env",
    "draw",
    "evaluate",
    "insert_after",
    "load_agent",
    "on_policy",
    "optimize",
    "remove",
    "replace",
    "replayed",
]

if TYPE_CHECKING:
    from .agents import A2C, DQN, PPO, SAC, TRPO, evaluate
    from .layers import ActionCritic, Critic, MLPPolicy, QPolicy, RecurrentPolicy, SquashedPolicy
    from .pipes import (
        AdvantageBuffer,
        EnvStepper,
        FragmentCollector,
        FragmentStacker,
        Lanes,
        ProcessReading,
        RayReading,
        draw,
        insert_after,
        on_policy,
        optimize,
        remove,
        replace,
        replayed,
    )
    from .pipes.graph.torchdata import DataLoader2
    from .runs import load_agent
    from .testing import check_env


def __getattr__(name):
    """Import a name when it is first used.

    So the command line starts without torch, and handles Ctrl-C while torch is imported.
    """
    if name in __all__:
        for room in ("pipes", "layers", "agents", "testing", "runs"):
            module = import_module(f".{room}", __name__)
            if hasattr(module, name):
                return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
