"""A contract kit for your own environments, actors and pipes: `check_env`, `check_actor`, `check_pipe`, and the rules by name.

For algorithms of your own there are environments whose values are known in closed form: `NarrowPath`, `Steering` and `Gates`.
"""
from .actor_rules import *
from .chains import Gates, NarrowPath, Steering
from .contract import ContractError, Violation
from .env_rules import *
from .pipe_rules import *

__all__ = ['ContractError', 'Gates', 'NarrowPath', 'Steering', 'Violation', 'check_actor', 'check_env', 'check_pipe']
