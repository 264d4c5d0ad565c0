"""What the failure words of devices (`DeviceState.why`) mean, and their remedies; docs/troubleshooting.md has all of them."""

from __future__ import annotations

REMEDIES = {
    "no_data": "fewer than two usable images, or none of the release's classes: put pictures into one folder per class, named exactly as"
    " the class",
    "out_of_memory": "counting or reading the images ran out of memory: use fewer or smaller pictures, or set keep",
    "killed": "a child process was ended by a signal, and is tried again a few times, then with new pictures, another release or after a"
    " restart. SIGILL is an instruction that the processor lacks, SIGSEGV or SIGBUS mostly bad memory or a bad card; edge-fl device doctor"
    " names the package",
    "enospc": "the card is full: free some space; the previous release continues to serve",
    "disk": "the card cannot be read or written: replace it; the previous release continues to serve",
    "budget_exhausted": "its next update would exceed its privacy budget: it no longer trains",
}
