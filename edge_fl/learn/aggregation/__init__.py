"""Aggregation of client updates: weighted mean, robust statistics, staleness correction."""
