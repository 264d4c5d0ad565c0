"""Faults of network connections and machines for a simulated fleet, reproducible from one seed."""
