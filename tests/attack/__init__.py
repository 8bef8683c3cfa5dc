"""Servers, and publishers, that mean harm.

``rogue`` is a server that lies, ``victim`` a query without Spark under a deadline. What is asked of
every attack: correct rows or a named error, in time, in bounded memory, and no secret given away.
"""
