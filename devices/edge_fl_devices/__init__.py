"""The device side: agent, personal head and data. Head-only devices need no torch."""
