"""A run that is not here: does it fit, how fast is it, what would be faster; drawn, fitted."""
