"""Cut a graph into steps, and plan the memory between them."""
