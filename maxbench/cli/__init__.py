"""The commands: one module each, whose main(argv) returns the exit code; entry.run() calls it."""
