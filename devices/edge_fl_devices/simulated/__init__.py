"""Simulated fleets: many agents in one process over a real broker, with scripted network and machine faults."""
