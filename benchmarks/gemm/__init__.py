"""GEMM on one GPU, beside its peers."""
