"""Cut a graph into steps."""
