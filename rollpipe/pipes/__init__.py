"""What flows and where it runs: environments, fragments, advantages and batches as datapipes."""
from .advantage import AdvantageBuffer
from .batches import FragmentStacker, Minibatcher
from .data import Final, Fragment, State, Tick
from .errors import ActorError, CheckpointError, DataError, EnvError, GraphError, PipeError, SpaceError
from .fragments import FragmentCollector
from .graph import copy_graph, draw, find, find_one, insert_after, insert_before, remove, replace
from .lanes import Lanes
from .pipe import Pipe
from .recipes import on_policy
from .stepper import EnvStepper

__all__ = [
    'ActorError', 'AdvantageBuffer', 'CheckpointError', 'DataError', 'EnvError', 'EnvStepper', 'Final', 'Fragment',
    'FragmentCollector', 'FragmentStacker', 'GraphError', 'Lanes', 'Minibatcher', 'Pipe', 'PipeError', 'SpaceError', 'State', 'Tick',
    'copy_graph', 'draw', 'find', 'find_one', 'insert_after', 'insert_before', 'on_policy', 'remove', 'replace',
]
