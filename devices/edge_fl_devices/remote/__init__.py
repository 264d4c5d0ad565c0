"""Answers to the operator's queries: the agent's log and diagnostics bundles."""
