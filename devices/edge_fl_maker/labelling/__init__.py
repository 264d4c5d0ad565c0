"""The label page of a device: its routes, who labels which picture, where it moves, and a head fitted after each label."""
