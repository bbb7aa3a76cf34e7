"""Gradient rules, by family of ops."""
