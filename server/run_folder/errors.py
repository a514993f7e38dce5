"""What a caller may want to catch of the server, where importing the package itself would be too much."""


class CannotResume(RuntimeError):
    """A run that cannot be resumed, or must not be; the message says why and what to do."""
