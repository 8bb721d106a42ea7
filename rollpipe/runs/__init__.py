"""Trainings in folders: they are started, continued, recorded, evaluated and exported."""
from .folder import Run, load_agent, resume, start
from .loops import resumed, saved
from .training import train

__all__ = ['Run', 'load_agent', 'resume', 'resumed', 'saved', 'start', 'train']
