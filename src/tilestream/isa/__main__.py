"""``python -m tilestream.isa``: compiles what `tilestream.isa.report.of` asks for, and answers in a line of JSON."""

import sys

from tilestream.isa.report import answer

if __name__ == "__main__":
    print(answer(sys.argv[1]), flush=True)
