"""Constants of the cost model, fitted to microbenchmarks of a device or to finished runs."""
