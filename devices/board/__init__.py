"""The board itself: how fast it is, how it feels, what it used, and what systemd hears of it."""
