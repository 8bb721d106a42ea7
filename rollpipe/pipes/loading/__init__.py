"""The project's own loader, for a Python where torchdata has none."""
