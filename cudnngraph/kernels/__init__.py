"""Generated kernels, for what lies between plans: CUDA C++ of a region of a graph, its launch."""
