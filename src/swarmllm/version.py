"""The version of this package, for greetings, files and `--version`. `setup.cfg` reads it from here."""

__version__ = "0.1.0"
