"""A contract kit for your own environments, actors and pipes: `check_env`, `check_actor`, `check_pipe`, and the rules by name.

For algorithms of your own there are two environments whose values are known in closed form, `NarrowPath` and `Steering`, and two with
goals, `goals.BitFlip` and `goals.PointReach`.
"""
from .actor_rules import *
from .chains import NarrowPath, Steering
from .contract import ContractError, Violation
from .env_rules import *
from . import goals   # registers its environments
from .pipe_rules import *

__all__ = ['ContractError', 'NarrowPath', 'Steering', 'Violation', 'check_actor', 'check_env', 'check_pipe']
