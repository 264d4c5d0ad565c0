"""The manifest format of releases."""
