"""The dashboard's pages, a module each: the parts of a page, and functions from values to their markup, rows and charts."""
