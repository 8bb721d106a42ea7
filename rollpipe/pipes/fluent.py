"""Importing this module adds methods to all datapipes: torchdata's functional form.

    import rollpipe.pipes.fluent
    pipe = EnvStepper("CartPole-v1", actor, n_envs=8).fragments(n_steps=128)
    pipe = pipe.lanes(2, seed=0).advantage(critic).stack(2)

`pipe.fragments(n_steps=128)` is `FragmentCollector(pipe, n_steps=128)`, and so on: see `NAMES`.
torchdata keeps one table of such names for the whole process. So only this module registers names,
and only in programs that import it. The module may be imported and reloaded any number of times, in
notebooks too.
"""

from .batches import AdvantageBuffer, FragmentStacker, Minibatcher, ToDevice
from .episodes import EpisodeCollector
from .data.errors import GraphError
from .fragments import FragmentCollector
from .frames import FrameStack
from .invariants import CheckInvariants
from .lanes import Lanes
from .replay.hindsight import StepMerger
from .steps import Fragments, Steps
from .taps import EpisodeStats, Tap, Throughput
from .graph.torchdata import IterDataPipe
from .transforms import NStep, ObservationCast, RewardScaler

__all__ = ["NAMES", "register"]

NAMES = {
    "advantage": AdvantageBuffer,
    "cast_observations": ObservationCast,
    "check_invariants": CheckInvariants,
    "episode_stats": EpisodeStats,
    "episodes": EpisodeCollector,
    "fragments": FragmentCollector,
    "frame_stack": FrameStack,
    "lanes": Lanes,
    "merge_steps": StepMerger,
    "minibatches": Minibatcher,
    "n_step": NStep,
    "regroup": Fragments,
    "scale_rewards": RewardScaler,
    "stack": FragmentStacker,
    "steps": Steps,
    "tap": Tap,
    "throughput": Throughput,
    "to_device": ToDevice,
}


def register(names: dict[str, type] | None = None) -> None:
    """Make each of `names` a method of all datapipes.

    A class may be registered again, as happens after a reload or when a notebook cell runs again.
    Then the method makes pipes of the new class, if its module and name are those of the old one.
    Raises `GraphError`, and registers nothing, if a name belongs to another class or to an
    attribute of all datapipes.

    Args:
        names: method name -> pipe class; None: `NAMES`
    """
    names = NAMES if names is None else names
    for name, cls in names.items():
        if not name.isidentifier() or hasattr(IterDataPipe, name):
            raise GraphError(
                f"{name!r} cannot be a method of all pipes",
                pipe=cls,
                expected="a name that pipes do not have yet",
            )
        owner = _owner(name)
        if owner is not None and _full_name(owner) != _full_name(cls):
            raise GraphError(
                f"the method name {name!r} is taken",
                pipe=cls,
                expected="a free name",
                got=".".join(_full_name(owner)),
            )
    for name, cls in names.items():
        IterDataPipe.functions.pop(name, None)
        IterDataPipe.register_datapipe_as_function(name, cls)


def _owner(name):
    "The class whose pipes the registered method `name` makes; None if there is no such method."
    function = IterDataPipe.functions.get(name)
    if function is None:
        return None
    # torch registers a pipe class as `partial(make, cls, ...)`. Other code may have registered
    # another function, which is then returned itself.
    return getattr(function, "args", (function,))[0]


def _full_name(cls) -> tuple:
    "Module and name of a class, or of another object as well as possible."
    return getattr(cls, "__module__", "?"), getattr(cls, "__qualname__", repr(cls))


register()
