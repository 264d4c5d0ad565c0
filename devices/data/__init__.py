"""A device's own images: read from its source, chosen, split once, reported in numbers, and never sent anywhere."""
