"""Pipeline parallelism: schedules, their executor, and the overlap of forward and backward pass."""
