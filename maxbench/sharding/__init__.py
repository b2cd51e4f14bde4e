"""The device mesh, the sharding of each weight, collectives, and ordering tokens."""
