"""A run's results folder: metrics, checkpoints, tracking, provenance."""
