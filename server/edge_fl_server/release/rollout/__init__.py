"""Roll-out of a release, of an extractor or of the agent, in stages: gates, pause, abort, roll back."""
