"""Devices: their memory, the precision that they can compute in, fp8, and whether layers are compiled."""
