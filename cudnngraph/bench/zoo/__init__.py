"""The zoo of ``cudnngraph bench zoo``: published architectures, each measured in its own process."""
