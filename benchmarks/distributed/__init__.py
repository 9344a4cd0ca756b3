"""Matmuls and collectives across GPUs."""
