"""The agent of one host, its ranks, and what ranks report to it."""
