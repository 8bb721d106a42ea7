"""What a user may choose: options, algorithms, presets, the configuration of a run."""
