"""The command line of what is executed on the emulator."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    from executed import engine

    engine.main()
