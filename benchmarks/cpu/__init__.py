"""The CPU backend, and a process's first call."""
