"""The command ``nats-stream-source``, also ``python -m nats_stream_source``; see ``main``."""
