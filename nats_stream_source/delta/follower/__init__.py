"""A follower: one process that keeps a Delta table equal to a bucket, without Spark."""
