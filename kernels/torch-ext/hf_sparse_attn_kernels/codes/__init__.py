"""Selection of single tokens by codes of a few bits a key dimension."""

BITS = (1, 2)
"""Bits of a channel's value."""
CORRECTIONS = ("unbiased", "least_squares")
"""Choices of the factor that scales a key's symbols."""
GROUP_REDUCE = ("softmax", "max")
STEP = 0.9957
"""Step between the values of 2 bits over the residual's root mean square: the best for a Gaussian (Max, 1960)."""
MOST_HALF = 65504.0
"""Greatest float16."""
LEAST_HALF = 2.0**-14
"""Least normal float16."""
UNITS = 16256
"""Units in the greatest channel of a query, 128 * 127: a whole number of units is 128 * high + low, both of 8 bits."""
ROTATED_UNITS = 31
"""Units in the greatest channel of a rotated query: four times as many fit into 8 bits."""
SHIFTS = ((3, 3, 3, 0, 0, 0, -2, -2), (6, 3, 3, 3, 0, 0, 0, -2))
"""To the left, of bits 0 to 7 of a byte, by the bit's place in its value: few, so that a shift serves several bits."""
UNIT_PLACE = 5
"""A product of a bit and a channel of the rotated query is in units of 2 ** -UNIT_PLACE: the highest place of a value's
bit 0 after its shift. A channel is doubled once for each place below, and again for each higher bit of its value."""
