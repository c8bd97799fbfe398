"""The version from the metadata of the installation: the last tag, and the changes after it."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("steptune")
except PackageNotFoundError:  # a checkout that is on the import path, and not installed
    __version__ = "0+unknown"
