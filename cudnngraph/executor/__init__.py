"""Run by torch: the reference executor, torch steps on a GPU, the memory between steps."""
