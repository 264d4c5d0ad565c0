"""Features of the device's data: run the extractor, cache its output, load features in this process or in a child, measure drift."""
