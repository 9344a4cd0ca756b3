"""Records of `tilestream.trace`: drawn, exported for Perfetto and loaded again, compared with their schedule."""
