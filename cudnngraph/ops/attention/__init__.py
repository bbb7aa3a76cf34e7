"""Attention as ops: what its kinds have in common, and the rows of each."""
