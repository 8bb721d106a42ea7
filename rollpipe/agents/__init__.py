"""What learns from the stream: one algorithm, one file."""
