"""``tilestream verify``: placeholder."""


def verify() -> None:
    """Check."""
