"""Launches of the hopper kernels."""
