"""General asyncio helpers: tasks, cancellation, retries. Independent of NATS and Spark."""
