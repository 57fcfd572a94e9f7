"""The version of mbridge."""

__version__ = "0.1.0"
