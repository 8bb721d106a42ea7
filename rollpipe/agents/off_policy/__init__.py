"""What learners from a replay memory share, and those for continuous actions."""
