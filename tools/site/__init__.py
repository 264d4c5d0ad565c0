"""The documentation site: `python -m tools.site` builds it from docs/ and the reference pages in build/docs/site."""
