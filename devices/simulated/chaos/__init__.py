"""Chaos for a simulated fleet: what links and machines do to it, from one seed, through the code that real devices run."""
