"""The command line of the compile gates."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    from gates import engine

    engine.main()
