"""The description of a run, workload files, and the command line."""
