"""Trouble of clusters of three: see ``cluster`` for the servers, ``watched`` for each by itself.

Proxy, harm and trial are those of ``faults``.
"""
