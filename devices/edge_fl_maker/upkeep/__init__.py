"""Reset a device, back it up, and remove it from its board; on the device itself, without the broker."""
