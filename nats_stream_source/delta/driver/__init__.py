"""Engine ``"delta-rs"``: tables that the driver's process changes, without a Spark job."""
