"""Record of what was read of each dataset."""
