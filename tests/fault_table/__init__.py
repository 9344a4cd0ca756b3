"""Faults made on purpose: what is done, how the call ends, and that the next call is right.

`engine` has what a row is and how it runs; `rows` has the rows; ``python -m fault_table.record`` writes the record that
docs/faults.md is made from.
"""
