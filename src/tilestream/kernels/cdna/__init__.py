"""Gluon on AMD CDNA: copies past the registers, inverse swizzle, MFMA. Compiled and checked, not run."""
