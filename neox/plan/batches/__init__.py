"""Batches: their sizes, the schedule of sizes and lengths, and which datasets their samples are of."""
