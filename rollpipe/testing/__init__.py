"""A contract kit for your own environments, actors and pipes: `check_env`, `check_actor`, `check_pipe`, and the rules by name.

For algorithms of your own there are two environments with values in closed form, `NarrowPath` and `Steering`, and one that needs a
memory, `Recall`. `chains.Gates` has masks of actions, `goals.BitFlip` and `goals.PointReach` have goals.
"""

from .actor_rules import *
from .chains import NarrowPath, Steering
from .contract import ContractError, Violation
from .env_rules import *
from . import goals  # registers its environments
from .pipe_rules import *
from .recall import Recall as Recall  # registers Recall-v0

__all__ = [
    "ContractError",
    "NarrowPath",
    "Steering",
    "Violation",
    "check_actor",
    "check_env",
    "check_pipe",
]
