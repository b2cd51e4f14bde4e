"""Performance figures of a run: FLOPs, MFU, statistics of step times. Needs no jax."""
