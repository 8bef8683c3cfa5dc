"""Received bytes as frames: the definition of a frame, and the compiled scanner."""
