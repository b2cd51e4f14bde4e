"""GPU types and networks as data."""
