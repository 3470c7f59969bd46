"""Sums of small tensors over the GPUs of one machine.

A message is 64 bits: a word of 32 bits of the tensor, and above it the count of the program's calls.
"""

PROGRAM_WORDS = 256
"""Words that a program of the kernel adds up, and that have a count of their own."""
MOST_PROCESSES = 8
HALVES = 2
"""Of a buffer, for calls with odd and even counts. A process begins a call when it has all words of the one before. By
then the others have ended the one before that, so its half is free."""
