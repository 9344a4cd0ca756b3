"""Tools beside the library: the checker of protocols, machine-code reports, sweeps. Installed with it."""
