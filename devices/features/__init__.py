"""The device's data turned into features by the extractor, in this process or in a short-lived child, and whether they drift."""
