"""Kernels compiled ahead: what calls launch, on a GPU that need not be here, and Triton's cache carried to others.

A process that uses this compiles, and launches nothing: see `tilestream.launch.compiling.ahead`.
"""
