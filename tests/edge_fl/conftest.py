"""The same examples on every machine and every run: a red test stays red until someone mends it."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("edge-fl", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("edge-fl")
