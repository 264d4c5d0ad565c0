"""Simulated fleets: many agents in one process, with scripted network and machine faults."""
