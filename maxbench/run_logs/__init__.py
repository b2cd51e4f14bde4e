"""Readers of runs: run folders, logs of other programs, NCCL calls, lists of suites."""
