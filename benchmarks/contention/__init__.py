"""GEMM while other kernels hold SMs."""
