"""Repair: budget, selection, refresh, and checks of the result."""
