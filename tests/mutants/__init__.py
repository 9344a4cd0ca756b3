"""Mutants: one table of bugs put in on purpose, and one engine that makes them.

`mutants.engine` edits Python text by its syntax tree and loads the result without writing a file. `mutants.checker`
lists the bugs that `tilestream_tools.verify` must find, `mutants.sanitized` those that Triton's concurrency sanitizer
must find. A row says where the bug is, what is edited, and what finds it.
"""
