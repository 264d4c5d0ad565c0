"""What the tools may import: the product and each other, so that a benchmark never depends on a test."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_tool_imports_a_test() -> None:
    tools = sorted((ROOT / "tools").rglob("*.py"))
    assert len(tools) > 50
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in tools
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(name.split(".")[0] == "tests" for name in _modules(node))
    ]
    assert not found, "\n".join(found)


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
