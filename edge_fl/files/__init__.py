"""Files: atomic writes, disk errors, descriptor limits."""
