"""One run on devices that are here: loop, timing, checkpoint, metrics, profile."""
