"""Searches for what to train on given rows: contributions, costs, evolution."""
