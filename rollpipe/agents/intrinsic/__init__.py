"""Rewards that come from the learner itself: what is new is worth a visit."""
