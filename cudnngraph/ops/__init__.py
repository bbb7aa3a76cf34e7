"""Ops: rows with inference and reference, meta kernels, views."""
