"""Trainings in folders: they are started, continued, recorded, evaluated and exported."""
from .folder import Run, load_agent, resume, start
from .asking import open_run
from .fork import fork
from .loops import resumed, saved
from .replay import replayed_run
from .training import train

__all__ = ['Run', 'fork', 'load_agent', 'open_run', 'replayed_run', 'resume', 'resumed', 'saved', 'start', 'train']
