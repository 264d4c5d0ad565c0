"""The devices: one agent, its head and its data; head-only devices need no torch."""
