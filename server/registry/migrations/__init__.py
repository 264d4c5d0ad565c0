"""How the registry's tables came to be what they are: numbered steps, applied by Alembic when a registry is opened."""
