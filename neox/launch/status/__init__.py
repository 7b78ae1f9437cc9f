"""Event log and status of a run."""
