"""The best checkpoint by a metric."""
