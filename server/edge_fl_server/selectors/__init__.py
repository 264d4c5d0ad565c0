"""Selectors: expressions over the tags and attributes of devices, such as ``site=berlin and not arch=armv7l``.

selectors.parse("site=berlin and memory_mb>=1024").matches({"name": "pi-07", "site": "berlin", "memory_mb": 2048})
fleet.selected(db, "main", "@berlin or pi-0*")      # names of devices, from the registry
"""

from edge_fl_server.selectors.expression import Selector, SelectorError, parse, require_groups, select

__all__ = ["Selector", "SelectorError", "parse", "require_groups", "select"]
