"""Trainings in folders, and the commands for one of them."""
from .folder import load_agent

__all__ = ["load_agent"]
