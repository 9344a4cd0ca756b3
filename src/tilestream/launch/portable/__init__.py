"""Launches of the portable kernels."""
