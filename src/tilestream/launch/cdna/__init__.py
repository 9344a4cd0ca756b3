"""Launches of the cdna kernels."""
