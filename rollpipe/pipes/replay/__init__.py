"""What a replay of past steps is made of."""
