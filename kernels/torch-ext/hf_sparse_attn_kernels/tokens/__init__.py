"""Selection of single tokens, one set for all heads."""
