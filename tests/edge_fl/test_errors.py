"""The tree in the docstring is the tree in the code, and its exit codes are those that the command line promises."""

import pytest

from edge_fl import errors
from edge_fl.errors import EdgeFLError, nearest


def drawn() -> dict[str, tuple[str, int]]:
    """Class name -> (name of its parent, exit code), read from the drawing in the module's docstring."""
    tree, ancestors = {}, {-1: "Exception"}
    for line in (errors.__doc__ or "").splitlines():
        name, *rest = line.lstrip(" │├└─").split() or [""]
        if not name.endswith("Error"):
            continue
        depth = (len(line) - len(line.lstrip(" │├└─"))) // 4 - 1  # the drawing is indented once
        ancestors[depth] = name
        tree[name] = (ancestors[depth - 1], int(rest[0]))
    return tree


def test_the_tree_is_as_drawn() -> None:
    written = {
        name: (kind.__bases__[0].__name__, kind.exit_code)
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, EdgeFLError)
    }
    root = {
        name: ("Exception" if name == "EdgeFLError" else parent, code)
        for name, (parent, code) in drawn().items()
    }
    assert len(written) == 20
    assert root == written


def test_exit_codes_are_the_promised_ones() -> None:
    codes = {name: code for name, (_, code) in drawn().items()}
    assert codes["RunError"] == 1
    assert codes["ConnectError"] == 2
    assert codes["DeadlineError"] == codes["GateError"] == 3
    assert codes["ConfigError"] == codes["DataError"] == codes["MethodError"] == 4


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("fedavgg", " (did you mean 'fedavg'?)"),
        ("rep", " (did you mean 'fedrep'?)"),
        ("xyz", " (known: fedavg, fedrep)"),
        ("", " (known: fedavg, fedrep)"),
    ],
)
def test_a_mistyped_name_gets_the_nearest_or_all(name: str, hint: str) -> None:
    assert nearest(name, {"fedrep", "fedavg"}) == hint
