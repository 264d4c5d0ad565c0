"""The contract of all methods: declaration, engine-independent steps, client state, device tiers, update codec."""
