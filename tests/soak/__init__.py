"""Many launches, many malformed calls, many damaged files: what no single test would show.

`launches` makes launches of random shapes, schedules and arrivals and watches memory, handles, threads and speed;
`malformed` draws calls from the ops' signatures; `parsers` damages files. Each draws from a seed that its record names,
and each run adds a row to the record: so runs add up.
"""
