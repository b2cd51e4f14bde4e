"""Runs that are over: read back, compared, shown."""
