"""Launches of the cpu kernels."""
