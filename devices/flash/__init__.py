"""Puts a device onto a Raspberry Pi: what the bundle holds is planned in pure functions, and three targets write it.

`contents` says what a person wants, `bundle` plans the files, `boot` the edits that make the first boot run them, `recognise` what a
boot partition is. `folder`, `image` and `ssh` are the targets; `wheels` and `ownwheel` fetch and pack what pip installs on the Pi.
"""
