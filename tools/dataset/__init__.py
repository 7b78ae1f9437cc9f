"""Inspection of token datasets: statistics, verification, division into parts."""
