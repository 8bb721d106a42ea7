"""What flows and where it runs: environments, fragments, advantages and batches as datapipes."""
from . import nested, returns
from .advantage import AdvantageBuffer, values
from .batches import FragmentStacker, Minibatcher, ToDevice, minibatches
from .data import Final, Fragment, State, Tick, TickSource
from .envs.with_image import WithImage
from .episodes import EpisodeCollector
from .errors import ActorError, CheckpointError, DataError, EnvError, GraphError, PipeError, SpaceError, WorkerError
from .fragment_ops import pad_episodes
from .fragments import FragmentCollector
from .fusion.rewrites import optimize
from .frames import FrameStack, Stacks
from .graph import copy_graph, draw, find, find_one, insert_after, insert_before, remove, replace
from .invariants import CheckInvariants
from .lanes import Lanes
from .manual import collect, context, prepare, rollout, startup
from .pipe import Pipe, Source
from .workers.reading import ProcessReading
from .cluster.reading import RayReading
from .profiling.profile import profile
from .profiling.report import Profile
from .recipes import on_policy, replayed, rollouts
from .replay.memory import ReplayMemory, Sample
from .replay.merged_steps import MergedStep, StepMerger
from .replay.pipe import Replay, Replayed
from .stepper import EnvStepper
from .steps import Fragments, Step, Steps
from .tensors.collector import TensorCollector
from .tensors.tensor_env import TensorEnv
from .taps import EpisodeEnd, EpisodeStats, Meter, Rate, Tap, Throughput
from .transforms import NStep, NSteps, ObservationCast, RewardScaler
from .modules import Handle, bump_version, version_of

__all__ = [
    'ActorError', 'AdvantageBuffer', 'CheckInvariants', 'CheckpointError', 'DataError', 'EnvError', 'EnvStepper',
    'EpisodeCollector', 'EpisodeEnd', 'EpisodeStats', 'Final', 'Fragment', 'FragmentCollector', 'FragmentStacker', 'Fragments',
    'FrameStack', 'GraphError', 'Handle', 'Lanes', 'MergedStep', 'Meter', 'Minibatcher', 'NStep', 'NSteps', 'ObservationCast', 'Pipe',
    'PipeError', 'ProcessReading', 'Profile', 'Rate', 'RayReading', 'Replay', 'ReplayMemory', 'Replayed', 'RewardScaler', 'Sample',
    'Source', 'SpaceError', 'Stacks', 'State', 'Step', 'StepMerger', 'Steps', 'Tap', 'TensorCollector', 'TensorEnv', 'Throughput', 'Tick',
    'TickSource', 'ToDevice', 'WithImage', 'WorkerError', 'bump_version', 'collect', 'context', 'copy_graph', 'draw', 'find', 'find_one',
    'insert_after', 'insert_before', 'minibatches', 'nested', 'on_policy', 'optimize', 'pad_episodes', 'prepare', 'profile', 'remove',
    'replace', 'replayed', 'returns', 'rollout', 'rollouts', 'startup', 'values', 'version_of',
    'DataLoader2',  # pyright: ignore[reportUnsupportedDunderAll]  `__getattr__` finds it
]


def __getattr__(name):
    "`DataLoader2` comes through the one door when it is first asked for: torchdata is slow to import."
    if name != 'DataLoader2': raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .torchdata import DataLoader2
    return DataLoader2
