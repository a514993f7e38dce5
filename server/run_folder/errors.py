"""The error of a run that cannot be resumed, in a module of its own so that catching it imports nothing else."""


class CannotResume(RuntimeError):
    """A run that cannot be resumed, or must not be; the message says why and what to do."""
