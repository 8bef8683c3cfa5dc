"""The differences between ``nats_kv`` and ``nats_stream``: offsets, splits, rows, error terms."""
