"""What the benchmarks share: result files, timing, tables."""
