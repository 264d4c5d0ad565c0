"""edge-fl: personalised federated learning that reaches real devices. This package is the floor: it imports none of its siblings."""

__version__ = "0.1.0"
