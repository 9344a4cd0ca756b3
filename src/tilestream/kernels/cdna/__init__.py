"""Gluon on AMD CDNA, gfx942 and gfx950: copies past the registers, inverse swizzle, MFMA. Compiled and checked, not run."""
