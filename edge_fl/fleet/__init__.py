"""What operators give to devices and people of a fleet: tags and roles."""
