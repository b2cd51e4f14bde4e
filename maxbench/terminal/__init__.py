"""Text for terminals: tables, definitions, folded lines."""
