"""How the lanes of a pipeline run in a Ray cluster."""
