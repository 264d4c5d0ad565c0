"""Calibration of the engines: rounds of a sample of the run's clients (`measure`), and what is recorded of them (`record`)."""
