"""Rules that turn ATen ops into ops of a graph, by family, and their table."""
