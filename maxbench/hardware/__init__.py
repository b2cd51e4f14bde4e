"""GPU types as data, and published performance figures."""
