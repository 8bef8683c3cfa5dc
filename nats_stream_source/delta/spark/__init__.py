"""Engine ``"spark"``: tables that Spark's MERGE changes."""
