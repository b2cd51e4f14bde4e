"""Runs on clusters: settings, a scheduler each, how jobs are."""
