"""Trainings in folders: they are started, continued, recorded, evaluated and exported."""

from .asking import open_run
from .folder import Run, resume, start
from .fork import fork
from .loops import resumed, saved
from .pack import load_agent, pack
from .replay import replayed_run
from .training import Wish, train

__all__ = [
    "Run",
    "Wish",
    "fork",
    "load_agent",
    "open_run",
    "pack",
    "replayed_run",
    "resume",
    "resumed",
    "saved",
    "start",
    "train",
]
