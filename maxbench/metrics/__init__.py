"""Performance figures of a run: FLOPs, MFU, statistics of step times. Imports no jax."""
