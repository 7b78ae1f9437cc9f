"""Hosts that compute more slowly than the others."""
