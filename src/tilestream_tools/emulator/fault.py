"""What each check of the emulator raises."""


class Fault(Exception):
    """The program did what no program may do."""
