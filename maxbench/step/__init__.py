"""The training step: synthetic data, optimizer, XLA options, and one compiled program."""
