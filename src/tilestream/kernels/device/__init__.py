"""Device functions that the portable, Hopper and CDNA kernels share."""
