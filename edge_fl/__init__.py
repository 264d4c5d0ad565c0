"""edge-fl: personalised federated learning for real devices. This package imports none of broker, devices and server.

Importing it switches off what dependencies would send by themselves, such as usage statistics (docs/security.md lists it). They read
environment variables when they are imported, and child processes inherit these. So every package of the product imports this one first,
and the systemd unit of a board has the variables, too. An onnxruntime that a program has imported before cannot be switched off any
more: its own function for that leaves lookups and files as they are (version 1.31).
"""

import os

__version__ = "0.1.0"

TELEMETRY_OFF = {
    "ORT_DISABLE_TELEMETRY": "1",  # onnxruntime
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",  # the engine `ray` does the rest
    "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub, which timm and peft use
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "DO_NOT_TRACK": "true",  # for dependencies of plug-ins; mlflow does not accept 1
}
"""Environment variables. They replace other values: what a device sends does not depend on its environment."""

os.environ.update(TELEMETRY_OFF)
