"""Triton: any GPU, Triton's interpreter in tests, and the fallback for what the fast kernels refuse."""
