"""A plan as text for people and as JSON for programs, with the totals of its run."""
