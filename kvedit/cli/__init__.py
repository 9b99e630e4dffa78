"""The command line: commands, error reporting, and output for people and programs."""
