"""Faults of clusters of three servers; ``replica_state`` has their streams and readers."""
