"""Devices as the server sees them: roster, assignments, detection of duplicate ids."""
