"""The command line: flags, commands and their output."""
