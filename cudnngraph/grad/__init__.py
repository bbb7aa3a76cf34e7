"""Differentiate a graph."""
