"""Servers and publishers that attack a query.

``tests.support.nats.rogue_server`` sends forged frames, ``tests.support.attack_target`` is a
query without Spark under a deadline. Each attack must end with correct rows or a named error,
in time, in bounded memory, and must not obtain a secret.
"""
