"""Learners from recorded steps, which need no environment."""
