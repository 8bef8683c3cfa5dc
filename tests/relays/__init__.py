"""Trouble on the way from another place: mirrors, leaf nodes, imported accounts.

``mirrored`` is a mirror that knows a part, ``jumps`` one whose clock is wrong; proxy, harm and
trial are those of ``faults``.
"""
