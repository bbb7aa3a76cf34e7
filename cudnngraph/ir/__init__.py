"""The graph as data: tensors, nodes, the frozen graph; its key, its form for other processes."""
