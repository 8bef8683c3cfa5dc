"""The Spark data sources ``nats_kv`` and ``nats_stream``."""
