"""Choose plans: by heuristics or by measurement, each checked before its first use."""
