"""A training run on the present devices: loop, log, checkpoints, metrics, profiles."""
