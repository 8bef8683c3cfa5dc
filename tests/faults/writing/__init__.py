"""Faults while messages are written: lost connections and PubAcks, full stores, leader changes."""
