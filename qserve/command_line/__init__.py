"""Building blocks of the command line: command rows, flags from settings, settings files."""
