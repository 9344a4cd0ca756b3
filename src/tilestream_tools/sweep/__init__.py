"""What it costs when the device is not all yours: schedules and peers, timed while somebody else holds a part of it.

Imported by the command ``tilestream sweep`` and by benchmarks; imports torch, and Triton where there is a GPU.
"""
