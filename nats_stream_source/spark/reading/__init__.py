"""Reads splits on the executors."""
