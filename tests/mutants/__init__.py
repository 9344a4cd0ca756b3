"""Mutants: tables of bugs put in on purpose, and one engine that makes them.

``tables/*.txt`` has the bugs: where, what is edited, and what the bug is found as. `mutants.table` reads them.
`mutants.engine` edits Python text by its syntax tree and loads the result without writing a file. `mutants.checker` has
the bugs that `tilestream_tools.verify` must find, `mutants.kernel_text` those that the tests of the kernels' text must
find, `mutants.sanitized` those that Triton's concurrency sanitizer must find.

`mutants.drawn` draws mutants of the whole package and runs the closest tests on each (``make mutants``).
"""
