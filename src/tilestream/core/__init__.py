"""Schedules, chunks, gates and the worker's loop, as integers and plain values. No torch, no Triton."""
