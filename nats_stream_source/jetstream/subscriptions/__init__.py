"""Push, pull and ordered subscriptions (ADR-15)."""
