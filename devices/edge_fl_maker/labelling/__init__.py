"""Labels given by people on the device, and what follows from them."""
