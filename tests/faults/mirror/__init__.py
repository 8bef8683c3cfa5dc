"""Faults of mirrors, leaf nodes and imports from another account.

``partial_mirror`` holds a part of its upstream, ``clock_skew`` has stored times that jump.
"""
