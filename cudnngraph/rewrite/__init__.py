"""Passes before the cut."""
