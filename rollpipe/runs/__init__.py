"""Trainings in folders: they are started, continued, recorded, evaluated and exported."""
from .folder import Run, load_agent, resume, start
from .fork import fork
from .loops import resumed, saved
from .replay import replayed_run
from .training import Wish, train

__all__ = ['Run', 'Wish', 'fork', 'load_agent', 'replayed_run', 'resume', 'resumed', 'saved', 'start', 'train']
