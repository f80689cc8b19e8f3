"""What can be wrong with a model or its source. Every message says what, where, the value found, the one expected, and what to do."""


class ModelError(Exception):
    """Base of every error about a model that a user can cause and mend."""


class UnsupportedModel(ModelError):  # noqa: N818 - reads as what it says: raise UnsupportedModel
    """A model that is refused by name, since it would be read wrongly."""


class SourceError(ModelError):
    """A model source that is missing, damaged, or of a kind that is not read."""
