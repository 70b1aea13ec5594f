"""Parts of the command line: rows of commands, flags from settings, settings files."""
