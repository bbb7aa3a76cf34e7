"""Tell what becomes of a graph: planning without a GPU, drawings."""
