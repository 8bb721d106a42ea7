"""Environments behind one checked, batched `reset` and `step`."""
