"""A connection to NATS servers over nats-py: settings, credentials, TLS, authentication."""
