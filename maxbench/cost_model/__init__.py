"""What a step takes that is not run: its program compiled, read, priced and played."""
