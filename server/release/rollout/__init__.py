"""Roll-out of a release: stages, gates, pause, abort, roll back."""
