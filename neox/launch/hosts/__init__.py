"""Hosts of a run: hostfile, placement of ranks, what a machine has, and checks of all hosts before a start."""
