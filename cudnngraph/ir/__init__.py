"""What a graph is: tensors, nodes, the frozen graph; its key and its form as data."""
