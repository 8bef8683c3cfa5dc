"""Change data in the terms of Spark's AUTO CDC: any rows, any keys, any sequence."""
