"""What an object of a device needs is given to its constructor: no code assigns to an attribute of another object."""

import ast
from collections.abc import Iterator
from pathlib import Path

import edge_fl_devices

PACKAGES = ("runtime", "workers", "agent", "data", "features", "storage", "doctor", "board", "simulated")
OF_OTHERS = {
    ("features/extractor.py", "options"),  # onnxruntime takes its settings as attributes
    ("workers/full.py", "_thread"),  # what one thread has built
}


def patched(tree: ast.Module) -> Iterator[str]:
    """The objects, other than `self` and `cls`, to whose attributes code assigns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if (owner := ast.unparse(node.value)) not in ("self", "cls"):
                yield owner
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            yield ast.unparse(node.args[0])


def test_nothing_assigns_to_an_attribute_of_another_object() -> None:
    root = Path(edge_fl_devices.__file__).parent
    found = {
        (str(path.relative_to(root)), owner)
        for package in PACKAGES
        for path in (root / package).rglob("*.py")
        for owner in patched(ast.parse(path.read_text()))
    }
    assert found == OF_OTHERS


def test_the_search_finds_plain_unpacked_and_augmented_assignments() -> None:
    code = "self.a = 1\na.x = 1\nb.x, c.y.z = 1, 2\nd.x += 1\ne.x: int = 1\nsetattr(f, 'x', 1)\nfor g.x in h.y: ...\n"
    assert set(patched(ast.parse(code))) == {"a", "b", "c.y", "d", "e", "f", "g"}
