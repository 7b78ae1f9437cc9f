"""The launcher process: start and supervision of the agents, explanation of a run's end, and decisions on restarts."""
