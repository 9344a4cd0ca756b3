"""The backends. Each is a package; `loop` is the protocol they all follow."""
