"""Persistent storage on the device: agent state, heads, downloaded chunks, and the two release slots."""
