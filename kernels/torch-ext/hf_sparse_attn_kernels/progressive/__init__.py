"""Attention to blocks in order of rank, up to the block at which enough of the weight is read."""
