"""Candidates and their costs, a file a backend and an op."""
