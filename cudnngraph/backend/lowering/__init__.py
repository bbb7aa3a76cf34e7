"""Lowering: a GraphSpec becomes a graph of the cuDNN frontend, one rule per op."""
