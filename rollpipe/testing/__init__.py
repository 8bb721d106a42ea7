"""A contract kit for your own environments, actors and pipes: `check_env`, `check_actor`, `check_pipe`, and the rules by name."""
from .actor_rules import *
from .contract import ContractError, Violation
from .env_rules import *
from .pipe_rules import *
