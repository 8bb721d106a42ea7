"""Streams on disk: any edge of a graph is written down and played back."""
