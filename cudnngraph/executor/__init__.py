"""Run by torch: the reference executor, and torch steps on a GPU."""
