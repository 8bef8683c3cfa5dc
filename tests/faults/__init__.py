"""Faults of network, servers, disks and processes, and attacks.

``tests.support.proxy`` injects faults between client and server; ``tests.support.recorded_stream``
records writes and compares them with the rows of a query. The slow tests are marked ``faults``
(``make test-faults``).
"""
