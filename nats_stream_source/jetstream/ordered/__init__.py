"""Ordered consumers (ADR-15): read a range of a stream, or follow it, without gaps."""
