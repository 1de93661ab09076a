"""Errors of reading and writing published models."""


class HubError(ValueError):
    """A file or a configuration cannot be used; the message names it, says what is legal and what to do."""
