"""The command line: flags, one call, and what is printed."""
