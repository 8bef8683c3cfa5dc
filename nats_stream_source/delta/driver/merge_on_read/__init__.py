"""The driver's engine for tables with deletion vectors: a commit writes only what changed."""
