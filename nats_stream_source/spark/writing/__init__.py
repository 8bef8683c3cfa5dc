"""Writing: rows of a DataFrame as messages of a bucket or a stream (executors)."""
