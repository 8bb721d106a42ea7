"""Tables over seeds: what a bench runs, and what a report says."""
