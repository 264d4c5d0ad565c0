"""What the failure words of devices (`DeviceState.why`) mean, and their remedies; docs/troubleshooting.md has all of them."""

from __future__ import annotations

REMEDIES = {
    "no_data": "fewer than two usable images, or none of the release's classes: put pictures into one folder per class, named exactly as"
    " the class",
    "out_of_memory": "counting or reading the images ran out of memory: use fewer or smaller pictures, or set keep",
    "enospc": "the card is full: free some space; the previous release continues to serve",
    "disk": "the card cannot be read or written: replace it; the previous release continues to serve",
    "budget_exhausted": "its next update would exceed its privacy budget: it no longer trains",
}
