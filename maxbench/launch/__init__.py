"""Jobs on clusters: variables, Slurm and Run:ai, the state of jobs."""
