"""The JetStream layer, over nats-py's connection: no Spark in here."""
