"""Which method to use, from the evidence of a study (`python -m tests.study`; docs/choosing-a-method.md)."""
