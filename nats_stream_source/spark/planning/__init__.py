"""The planner on the driver: start positions, ranges, splits, data loss."""
