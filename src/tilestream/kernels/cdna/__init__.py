"""Gluon kernels for AMD CDNA: copies that bypass the registers, inverse swizzle, MFMA. Run on an emulator only."""
