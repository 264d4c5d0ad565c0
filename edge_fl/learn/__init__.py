"""Pure pieces of learning in torch: parts, batches, fit, losses, means."""
