"""Graphs that cuDNN refuses, and why: ops left to torch, and graphs that are cut."""
