"""The values that each page shows: frozen structs, read, sorted and paged by the database."""
