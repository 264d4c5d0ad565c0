"""The agent, pure: `step` decides; state, events, effects, wants and outbox are what it is made of."""
