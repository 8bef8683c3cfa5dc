"""Direct Get (ADR-31): single messages, batches, and the last message of many subjects."""
