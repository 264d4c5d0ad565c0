"""Roll-out of a release in stages: gates, pause, abort, roll back."""
