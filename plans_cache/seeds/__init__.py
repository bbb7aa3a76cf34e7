"""Pre-tuned records that ship with the package: ``<id>.json``, here or one folder down."""
