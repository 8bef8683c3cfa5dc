"""Publishing with acknowledgements (PubAck)."""
