"""What takes part in a training besides the step: one folder a feature, listed in `table`."""
