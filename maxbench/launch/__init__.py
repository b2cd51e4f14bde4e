"""Runs on clusters: settings, a scheduler each, a look at the nodes before step 0."""
