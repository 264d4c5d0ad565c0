"""The label page of a device: its routes, who labels which file, where it moves, and a head fitted after each label."""
