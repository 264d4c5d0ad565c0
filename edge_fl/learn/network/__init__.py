"""Networks as named parts: parameters, batch normalisation with masks, closed-form chains, precision."""
