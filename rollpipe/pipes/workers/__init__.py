"""How the lanes of a pipeline run in worker processes."""
