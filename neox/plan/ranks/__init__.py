"""Ranks: degrees of parallelism, the layers of each pipeline stage, and the order of its passes."""
