"""Engine ``"driver"``: tables that this process changes, without Spark."""
