"""Updates of devices: round requests, their broadcasts, and validation of what devices send back."""
