"""What a run finds here: environment, processes, hosts and links; checked, and measured."""
