"""The device's agent: a pure state machine. `step` maps state, event and time to the next state and effects."""
