"""Reports on finished runs: comparison, diagnosis, tables, and the page."""
