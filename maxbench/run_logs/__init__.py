"""Runs from their files: run folders, logs of other programs, NCCL's calls, lists of suites."""
