"""Faults of clusters of three servers.

``tests.support.nats.cluster`` starts the servers, ``replica_state`` reads the state of each
replica, ``stalled_reader`` stops a reader in the middle of a split or a batch.
"""
