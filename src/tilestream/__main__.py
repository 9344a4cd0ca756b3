"""``python -m tilestream``: the command line, as the script ``tilestream`` runs it."""

import importlib

if __name__ == "__main__":
    importlib.import_module("tilestream_tools.cli").main()
