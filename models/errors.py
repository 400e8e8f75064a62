"""The error for a checkpoint that cannot be used."""


class ModelLoadError(ValueError):
    """A model cannot be loaded. The message names the file, what was found, what was expected, and the way out."""
