"""Run:ai: the same command, submitted through the Run:ai command line as a JAX workload."""
