"""Streams on disk: any edge of a graph is written down and played back."""

from .minari_source import from_minari
from .minari_files import to_minari
from .data_sampler import whole_episodes

__all__ = ["from_minari", "to_minari", "whole_episodes"]
