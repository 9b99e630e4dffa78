"""What benchmarks and tests share: tiny checkpoints, and rigs that measure, kill and check."""
