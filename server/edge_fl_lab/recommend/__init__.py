"""Which method to use, from the evidence of a study (`python -m tools.study`; docs/choosing-a-method.md)."""
