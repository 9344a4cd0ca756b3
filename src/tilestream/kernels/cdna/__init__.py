"""Gluon on AMD CDNA: copies past the registers, inverse swizzle, MFMA. Executed on an emulator only."""
