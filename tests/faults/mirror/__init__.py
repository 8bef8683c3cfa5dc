"""Faults of mirrors, leaf nodes and imports from another account."""
