"""Terminal output: status lines, tables, progress bars, units, and hints about missing extras."""
