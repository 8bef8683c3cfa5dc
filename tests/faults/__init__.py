"""Faults of network, servers, disks and processes, and attacks.

``tests.support.proxy`` injects faults between client and server; ``tests.support.workload``
writes, reads as Spark would, and compares. The slow tests are marked ``faults``
(``make test-faults``).
"""
