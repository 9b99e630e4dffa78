"""Rows: where each one is stored, keys and values in memory, RoPE, memory that is left."""
