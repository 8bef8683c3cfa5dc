"""Trouble on purpose: a proxy that knows frames, and scenarios on one server.

``proxy`` does the harm, ``harm`` names it, ``command`` is for the command line; ``trial`` writes,
reads as Spark would, and compares. Scenarios of several servers are in ``clusters`` and
``relays``; the slow ones are marked ``faults`` (``make test-faults``).
"""
