"""Trainings in folders: they are started, continued, recorded, evaluated and exported."""
from .folder import Run, load_agent, resume, start
from .training import train

__all__ = ['Run', 'load_agent', 'resume', 'start', 'train']
