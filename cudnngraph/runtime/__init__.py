"""Compile and run graphs."""
