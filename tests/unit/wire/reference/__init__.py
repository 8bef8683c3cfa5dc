"""The plain reference parser of the wire tests, its random streams, and the fuzz target."""
