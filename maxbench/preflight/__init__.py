"""Checks of the nodes before the first step."""
