"""Quest's whole decode step: selection over the pages, and attention to the chosen ones."""
