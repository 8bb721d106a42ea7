"""Trainings in folders: they are started, continued, recorded, evaluated and exported."""

from .folder import Run, resume, start
from .fork import fork
from .logs import MetricFiles, Progress, read_metrics
from .loops import resumed, saved
from .mailbox import open_run
from .moments import replayed_run, verify
from .pack import load_agent, pack
from .training import Observer, Wish, observed, train
from ..settings.config import make_config
from ..traces.differences import diff

__all__ = [
    "MetricFiles",
    "Observer",
    "Progress",
    "Run",
    "Wish",
    "diff",
    "fork",
    "load_agent",
    "make_config",
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
    "verify",
]
