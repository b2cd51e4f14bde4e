"""Where things live: the mesh of devices, the place of each weight, collectives between GPUs."""
