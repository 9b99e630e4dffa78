"""Repair: budget, selection, refresh, and what checks them."""
