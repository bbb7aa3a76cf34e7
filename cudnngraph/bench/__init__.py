"""Benchmarks: cases with what torch does for them."""
