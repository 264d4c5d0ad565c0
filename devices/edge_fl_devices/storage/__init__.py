"""Persistent storage of a device: state and heads, downloaded chunks, and the two release slots."""
