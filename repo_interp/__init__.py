"""repo_interp: a microscope for token positions in attention."""

__version__ = "0.1.0"
