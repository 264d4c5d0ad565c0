"""Workers carry out the agent's effects: head-only fitting, full local training, or both."""
