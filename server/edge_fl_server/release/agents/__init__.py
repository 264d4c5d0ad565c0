"""Releases of the agent's own software: signed wheels, and their roll-out."""
