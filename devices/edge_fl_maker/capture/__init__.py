"""Pictures without labels: capture from cameras, streams and a watched folder, and the pool that keeps the most informative of them."""
