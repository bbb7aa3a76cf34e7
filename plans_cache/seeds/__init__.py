"""Pre-tuned records that ship with the package, one ``<gpu>/<id>.json`` each; read, never written.

``<gpu>/families.json`` lists them by family, for graphs that they are near;
``<gpu>/steps-<environment>.json`` has what was chosen for each of their steps, and for those of
whole models, for other graphs with that step.

``cudnngraph plans export --seeds plans_cache/seeds`` writes them from a cache directory.
"""
