"""What a caller may want to catch of the server's room, where importing the room itself would be too much."""


class CannotResume(RuntimeError):
    """A run that cannot go on, or that must not; the message says why and what to do."""
