"""The version, apart from the public names, which import everything."""

__version__ = "0.1.0"
