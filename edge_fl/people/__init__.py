"""People who operate a fleet: their roles, and who runs a command."""
