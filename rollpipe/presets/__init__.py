"""Settings that are known to work, one TOML file for each algorithm, and what chooses and lists them."""
