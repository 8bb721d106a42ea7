"""Trainings in folders: they are started, continued, recorded, evaluated and exported."""

from .asking import open_run
from .folder import Run, resume, start
from .fork import fork
from .logs import MetricFiles, read_metrics
from .loops import resumed, saved
from .pack import load_agent, pack
from .replay import replayed_run
from .progress import Progress
from .training import Observer, Wish, observed, train

__all__ = [
    "MetricFiles",
    "Observer",
    "Progress",
    "Run",
    "Wish",
    "fork",
    "load_agent",
    "observed",
    "open_run",
    "pack",
    "read_metrics",
    "replayed_run",
    "resume",
    "resumed",
    "saved",
    "start",
    "train",
]
