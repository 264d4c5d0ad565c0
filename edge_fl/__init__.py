"""edge-fl: personalised federated learning for real devices. This package imports none of broker, devices and server."""

__version__ = "0.1.0"
