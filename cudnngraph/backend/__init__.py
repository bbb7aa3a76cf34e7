"""The cuDNN backend: the only place that imports ``cudnn`` or ``cuda.bindings``."""
