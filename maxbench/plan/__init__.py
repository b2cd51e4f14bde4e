"""A run that is not here: compile its step, read the program, price it, play it, draw, search."""
