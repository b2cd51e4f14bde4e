"""The commands: one module each, whose main(argv) returns an exit code."""
