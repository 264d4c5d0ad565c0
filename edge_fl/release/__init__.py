"""What a device may run: artefacts in verified chunks, two slots, and signed release metadata."""
