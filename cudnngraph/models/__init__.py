"""Whole models: trace them, match patterns, convert them to graphs."""
