"""Torch devices, nothing of graphs: memory, clocks, files."""
