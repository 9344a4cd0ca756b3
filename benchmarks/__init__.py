"""Benchmarks of tilestream: `run.py` runs them, `report` renders their records."""
