"""The device's own images: read from their source, selected, split, and summarised in numbers. Images never leave the device."""
