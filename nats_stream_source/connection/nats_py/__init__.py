"""All code that uses private names of nats-py; tests verify them with the installed version."""
