"""Inputs that arrive while the kernel runs."""
