"""What travels, and how: messages, topics, tensors and the transports that carry them."""
