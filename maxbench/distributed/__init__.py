"""Start-up of a run's processes: environment, rendezvous, watch for lost peers, slow hosts."""
