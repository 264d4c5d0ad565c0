"""What each page shows, as frozen values: read from the registry, sorted and paged by the database."""
