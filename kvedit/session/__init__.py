"""Sessions: every verb of the command line as a method."""
