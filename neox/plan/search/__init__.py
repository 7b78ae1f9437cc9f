"""Search for layouts of a run: the fastest, the nearest that fit in memory, those for longer samples."""
