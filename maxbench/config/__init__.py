"""What a run is: its description, checked; workload files and their tables; the command line."""
