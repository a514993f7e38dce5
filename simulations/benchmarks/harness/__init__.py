"""What the benchmarks share: timing, tables."""
