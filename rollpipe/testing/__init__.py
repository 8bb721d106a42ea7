"""A contract kit for your own environments, actors and pipes.

`check_env`, `check_actor` and `check_pipe` check them by rules, each of which has a name. For
algorithms of your own there are two environments with values in closed form, `NarrowPath` and
`Steering`. `tasks.Recall` needs a memory, `tasks.Luck` a critic that sees more than the actor.
`tasks.Gates` has masks of actions, `tasks.BitFlip` and `tasks.PointReach` have goals.
"""

from .actor_rules import *
from .contract import ContractError, Violation
from .env_rules import *
from .pipe_rules import *
from .tasks import NarrowPath, Steering
from .tasks import Recall as Recall  # registers Recall-v0

__all__ = [
    "ContractError",
    "NarrowPath",
    "Steering",
    "Violation",
    "check_actor",
    "check_env",
    "check_pipe",
]
