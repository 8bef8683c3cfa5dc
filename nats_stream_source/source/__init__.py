"""The Spark data sources: options and offsets, the planner on the driver, the reader of a split."""
