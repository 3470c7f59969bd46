"""Progressive Sparse Attention's whole decode step as one op."""
