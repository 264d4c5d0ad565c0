"""Installation of a release: download, verification, and the canary in a child process with limits."""
