"""The documentation site: `python -m tests.site` builds it from docs/ and the reference pages in build/docs/site."""
