"""What runs have left, read back: our folders, logs of other programs, NCCL's calls."""
