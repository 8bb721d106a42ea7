"""The search for settings that learn well, with Optuna."""
