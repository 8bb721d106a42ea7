"""What a user may choose: options out of signatures, algorithms, presets, the configuration of a run."""
