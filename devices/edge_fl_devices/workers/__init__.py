"""Workers carry out the agent's jobs: installing releases and fitting heads, full local training, or both."""
