"""``tilestream report``: what this machine does with some calls, measured, as a page that is looked at.

`measure` gives one JSON object, `page` makes one HTML file of it. Neither needs typer or rich:
``python -m tilestream_tools.report`` runs where torch is, and on a GPU Triton.
"""
