"""The dashboard's pages, a module each: `read` gives a frozen struct from the registry, `build` shows it."""
