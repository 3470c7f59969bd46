"""Block selection over fixed pages of the KV cache."""

STATISTICS = ("minmax", "cuboid_mean", "representative")
"""Statistics of a page's keys that bounds can hold."""
REPRESENTATIVES = 4
"""Keys of a page whose mean represents it."""
SUMMED_AS_TREE = 32
"""Tokens that are summed pairwise. Longer pages add the sums of this many tokens in order."""
