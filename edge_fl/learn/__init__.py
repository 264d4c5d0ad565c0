"""Training in torch as pure functions: network parts, batches, fit, losses, aggregation, update encoding."""
