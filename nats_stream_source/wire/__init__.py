"""Pure: bytes in, Arrow out; no I/O, no clock, no Spark, no nats-py."""
