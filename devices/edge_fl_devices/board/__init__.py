"""The board: speed benchmark, health, daily usage and budgets, and systemd notifications."""
