"""Helpers of benchmarks and tests: tiny checkpoints, and rigs that measure, kill and check."""
