"""Devices of a fleet: their states and capabilities, their assignments, and detection of duplicate identities."""
