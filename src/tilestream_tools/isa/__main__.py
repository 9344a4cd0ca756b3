"""``python -m tilestream_tools.isa``: compile what `isa.report.of` asks for; print one line of JSON."""

import sys

from tilestream_tools.isa.report import answer

if __name__ == "__main__":
    print(answer(sys.argv[1]), flush=True)
