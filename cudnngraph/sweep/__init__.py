"""The sweep of `cudnngraph check`: graphs, candidates, what is found."""
