"""Publishing with acknowledgements (PubAck)."""

MAX_IN_FLIGHT = 4096
"""Messages of one publisher that wait for their PubAcks, where the caller sets no other limit."""
