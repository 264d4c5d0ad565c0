"""Updates of the agent's own software: a second environment, its canary, the switch, and the return to the environment before."""
