"""Pre-tuned records that ship with the package, one ``<gpu>/<id>.json`` each; read, never written.

``cudnngraph plans export --seeds plans_cache/seeds`` writes them from a cache directory.
"""
