"""The rule by which events change the rows of a table: pure, in Arrow, without Spark and I/O."""
