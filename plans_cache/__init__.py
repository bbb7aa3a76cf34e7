"""plans_cache: stored plan choices and pooled workspaces, on the standard library alone."""
