"""Published models, each measured in a process of its own: ``cudnngraph bench zoo``."""
