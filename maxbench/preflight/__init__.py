"""Checks of XLA flags, processes and nodes before the first step."""
