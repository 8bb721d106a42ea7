"""What flows and where it runs: environments, fragments, advantages and batches as datapipes."""
from . import nested, returns
from .advantage import AdvantageBuffer, values
from .batches import FragmentStacker, Minibatcher
from .data import Final, Fragment, State, Tick
from .errors import ActorError, CheckpointError, DataError, EnvError, GraphError, PipeError, SpaceError
from .fragments import FragmentCollector
from .graph import copy_graph, draw, find, find_one, insert_after, insert_before, remove, replace
from .lanes import Lanes
from .pipe import Pipe, Source
from .recipes import on_policy
from .stepper import EnvStepper
from .weights import Handle, bump_version, version_of

__all__ = [
    'ActorError', 'AdvantageBuffer', 'CheckpointError', 'DataError', 'DataLoader2', 'EnvError', 'EnvStepper', 'Final', 'Fragment',
    'FragmentCollector', 'FragmentStacker', 'GraphError', 'Handle', 'Lanes', 'Minibatcher', 'Pipe', 'PipeError', 'Source', 'SpaceError',
    'State', 'Tick', 'bump_version', 'copy_graph', 'draw', 'find', 'find_one', 'insert_after', 'insert_before', 'nested', 'on_policy',
    'remove', 'replace', 'returns', 'values', 'version_of',
]


def __getattr__(name):
    "`DataLoader2` comes through the one door when it is first asked for: torchdata is slow to import."
    if name != 'DataLoader2': raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .torchdata import DataLoader2
    return DataLoader2
