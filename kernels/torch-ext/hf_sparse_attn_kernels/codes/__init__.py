"""Selection of single tokens by codes of a few bits a key dimension."""

BITS = (1, 2)
"""Bits of a channel's value."""
GROUP_REDUCE = ("softmax", "max")
STEP = 0.9957
"""Step between the values of 2 bits over the residual's root mean square: the best for a Gaussian (Max, 1960)."""
MOST_HALF = 65504.0
"""Greatest float16."""
LEAST_HALF = 2.0**-14
"""Least normal float16."""
UNITS = 16256
"""Units in the greatest channel of a query, 128 * 127: a whole number of units is 128 * high + low, both of 8 bits."""
