"""Declare a graph: the builder and its values."""
