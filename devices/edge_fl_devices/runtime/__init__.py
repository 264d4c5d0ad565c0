"""Runs the agent on a device: connection, event loop, enrolment, file watching, and the assembly of one real device."""
