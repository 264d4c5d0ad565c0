"""For makers with one board: label pictures in a browser, collect them from a camera, serve predictions, back up and reset a device.

An extension of `edge_fl_devices`, which never imports it. It adds commands `edge-fl device ...` through the entry points
"edge_fl.commands"; on the device it reads the folders that the agent writes, and hands it labelled pictures as files.
"""

import edge_fl  # noqa: F401  # before any dependency: it switches their telemetry off
