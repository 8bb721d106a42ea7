"""Streams on disk: any edge of a graph is written down and played back."""

from .minari_source import from_minari
from .minari_writer import to_minari
from .whole_episodes import whole_episodes

__all__ = ["from_minari", "to_minari", "whole_episodes"]
