"""Class statistics: what a device may add to a sum over devices, and the prior that the sum gives to all of them."""
