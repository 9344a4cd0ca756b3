"""Attention prefill on one GPU, beside its peers."""
