"""Memory that a run needs on one device, estimated from its plan."""
