"""Replies to a Direct Get (ADR-31), read one by one or as columns."""
