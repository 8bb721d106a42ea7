"""Environments whose batch is made of tensors, stepped on their device."""
