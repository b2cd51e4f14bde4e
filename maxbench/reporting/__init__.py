"""Runs that are over: compared, judged, shown."""
