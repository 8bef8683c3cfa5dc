"""Object stores: reading and writing objects."""
