"""How each ATen op is said in a graph of ours: rules by family, and their table."""
