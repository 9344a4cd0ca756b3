"""Candidates and their costs: one file for each backend and op."""
