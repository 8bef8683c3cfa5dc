"""Trouble of more than one server: clusters of three, mirrors, leaf nodes, imported accounts.

``watched`` looks at a cluster's servers one by one, ``mirrored`` is a mirror that knows a part;
proxy, harm and trial are those of ``faults``.
"""
