"""Policies, which score rows and units. Each has one file and one line in `registry`."""
