"""Keys and values in pinned host memory that kernels of the device read and write themselves."""
