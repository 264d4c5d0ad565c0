"""Queries of the registry for the dashboard's pages: a module with a frozen struct per page, sorted and paged by the database."""
