"""Class statistics: what a head-only device may add to a sum over devices, and the prior that the sum gives to every device's head."""
