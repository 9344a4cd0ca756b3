"""Tools beside the library, installed with it: command line, checker, machine-code reports, drawings, sweeps."""
