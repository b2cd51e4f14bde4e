"""Cost model: compiled programs, op costs, and the simulation of a step."""
