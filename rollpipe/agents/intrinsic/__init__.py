"""Rewards that come from the learner itself: novel observations are rewarded, so that the actor visits them."""
