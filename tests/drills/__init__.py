"""Faults, kills, freezes and hostile input, injected at random: `python -m tests.drills.NAME`."""
