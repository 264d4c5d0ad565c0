"""Supply-chain evidence in one folder (`make dossier`): python -m tools.dossier."""
