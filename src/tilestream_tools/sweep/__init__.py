"""Contention: schedules and peers timed while another kernel or process holds a part of the device.

Used by the command ``tilestream sweep`` and by benchmarks; imports torch, and Triton where there is a GPU.
"""
