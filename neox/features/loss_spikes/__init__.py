"""Detection of loss spikes, and rollback."""
