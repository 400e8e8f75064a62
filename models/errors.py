"""The one error that a bad checkpoint ends in."""


class ModelLoadError(ValueError):
    """A model cannot be loaded: names the file, what was found, what was expected, and the way out."""
