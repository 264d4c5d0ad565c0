"""People in the registry: their tokens, and the log of what they did."""
