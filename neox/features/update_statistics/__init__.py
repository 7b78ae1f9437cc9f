"""Global statistics of each update."""
