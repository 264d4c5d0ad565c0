"""From a recipe to its results, simulated or with a fleet."""
