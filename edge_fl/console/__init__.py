"""Terminal output: progress bars, units, and messages about missing extras."""
