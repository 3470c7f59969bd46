"""Products of a single row, as of a decode step of one text."""
