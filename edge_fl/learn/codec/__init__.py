"""Update transformations: compression, and clipping with noise for differential privacy."""
