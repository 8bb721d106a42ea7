"""The pipes that a user composes, from environments to batches; their data; and edits of graphs."""

from .data import nested, returns
from .batches import AdvantageBuffer, FragmentStacker, Minibatcher, ToDevice
from .data.fragment import Fragment, State
from .data.fragment_ops import with_rewards
from .envs.watching import WithImage
from .episodes import EpisodeCollector
from .data.errors import (
    ActorError,
    CheckpointError,
    DataError,
    EnvError,
    GraphError,
    PipeError,
    SpaceError,
    WorkerError,
)
from .fragments import FragmentCollector
from .frames import FrameStack
from .graph.edits import (
    copy_graph,
    draw,
    find,
    find_one,
    insert_after,
    insert_before,
    remove,
    replace,
)
from .invariants import CheckInvariants
from .lanes import Lanes
from .fragments import collect, context, prepare, rollout, startup
from .graph.modules import bump_version
from .graph.pipe import Pipe, Source
from .workers.reading import ProcessReading
from .cluster.ray_crew import RayReading
from .profiling.profile import profile
from .recording.recorder import Recorder
from .recording.replayer import Replayer
from .recipes import on_policy, replayed, rollouts
from .replay.memory import ReplayMemory
from .replay.hindsight import StepMerger
from .replay.pipe import Replay
from .passes import optimize
from .stepper import EnvStepper
from .tensors.tensor_env import TensorEnv
from .taps import EpisodeStats, Tap
from .transforms import NStep, ObservationCast, RewardScaler

__all__ = [
    "ActorError",
    "AdvantageBuffer",
    "CheckInvariants",
    "CheckpointError",
    "DataError",
    "EnvError",
    "EnvStepper",
    "EpisodeCollector",
    "EpisodeStats",
    "Fragment",
    "FragmentCollector",
    "FragmentStacker",
    "FrameStack",
    "GraphError",
    "Lanes",
    "Minibatcher",
    "NStep",
    "ObservationCast",
    "Pipe",
    "PipeError",
    "ProcessReading",
    "RayReading",
    "Recorder",
    "Replay",
    "ReplayMemory",
    "Replayer",
    "RewardScaler",
    "Source",
    "SpaceError",
    "State",
    "StepMerger",
    "Tap",
    "TensorEnv",
    "ToDevice",
    "WithImage",
    "WorkerError",
    "bump_version",
    "collect",
    "context",
    "copy_graph",
    "draw",
    "find",
    "find_one",
    "insert_after",
    "insert_before",
    "nested",
    "on_policy",
    "optimize",
    "prepare",
    "profile",
    "remove",
    "replace",
    "replayed",
    "returns",
    "rollout",
    "rollouts",
    "startup",
    "with_rewards",
    "DataLoader2",  # pyright: ignore[reportUnsupportedDunderAll]  `__getattr__` finds it
]


def __getattr__(name):
    "Import `DataLoader2` when it is first used, because importing torchdata is slow."
    if name != "DataLoader2":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .graph.torchdata import DataLoader2

    return DataLoader2
