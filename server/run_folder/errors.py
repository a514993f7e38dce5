"""Why a run cannot be resumed, apart from what finds it out, so that whoever catches it need not import that."""


class CannotResume(RuntimeError):
    """A run that cannot be resumed, or must not be; the message says why and what to do."""
