"""Rows: the piece table, keys and values in memory, RoPE, available memory."""
