"""Keys and values in host memory, with a pool of blocks on the device."""
