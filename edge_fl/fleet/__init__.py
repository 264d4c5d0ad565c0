"""What server, broker and devices share about the devices of a fleet."""
