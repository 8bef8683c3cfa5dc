"""Trouble on purpose: a proxy that knows frames, and scenarios on servers and clusters.

``proxy`` does the harm, ``harm`` names it, ``command`` is for the command line; ``trial`` writes,
reads as Spark would, and compares. The slow scenarios are marked ``faults`` (``make test-faults``).
"""
