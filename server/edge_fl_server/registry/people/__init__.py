"""People in the registry: their tokens."""
