"""Find places where a path becomes text without `edge_fl.files.paths`, by a light inference of which expressions are paths.

A path is what is annotated as one (parameters, fields, results of functions), made by `Path(...)`, `/` or a method of a path, or an item
of what holds paths. Its name, stem, suffix and parts are as dangerous as itself. Formatting one is a finding: an f-string, `str()`, `%`,
a log call, `print`, `join` or `.encode()`; f-strings that are the name of another path again are not.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PATH, PATHS, NAMES = "path", "paths", "names"
"""Kinds of expressions: a path or a part of one, several paths, several of their names."""
PARTS = {"name", "stem", "suffix", "parent"}
SAME = {
    "with_name",
    "with_suffix",
    "with_stem",
    "resolve",
    "absolute",
    "expanduser",
    "joinpath",
    "relative_to",
    "rename",
    "as_posix",
    "removesuffix",
    "removeprefix",
}
MANY = {"iterdir", "glob", "rglob"}
ORDERED = {"sorted", "list", "tuple", "set", "reversed", "filter", "next", "min", "max"}
NAMING = {
    "Path",
    "with_name",
    "with_stem",
    "with_suffix",
    "joinpath",
    "glob",
    "rglob",
    "fspath",
    "link_to",
    "replace",
}
LOGGING = {"debug", "info", "warning", "error", "exception", "critical", "log"}
Kinds = dict[str, str]


@dataclass
class Known:
    """What all sources together say: functions that return paths, fields that are paths, names of annotations that mean a path."""

    functions: Kinds = field(default_factory=dict)
    fields: Kinds = field(default_factory=dict)
    aliases: Kinds = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """A path that becomes text: where, and the expression."""

    line: int
    node: ast.expr
    how: str


def known(trees: Iterable[ast.Module]) -> Known:
    """Collect what the sources declare. A name that is declared as something else as well does not count."""
    found = Known()
    declared: dict[str, defaultdict[str, set[str]]] = {
        kind: defaultdict(set) for kind in ("functions", "fields", "aliases")
    }
    trees = list(trees)
    for _ in range(2):  # aliases first
        for tree in trees:
            for node in ast.walk(tree):
                match node:
                    case ast.FunctionDef(name=name, returns=ast.expr() as returns):
                        declared["functions"][name].add(_annotated(returns, found))
                    case ast.ClassDef():
                        for name, kind in _fields(node, found):
                            declared["fields"][name].add(kind)
                    case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() as value):
                        declared["aliases"][name].add(_annotated(value, found))
        for kind, names in declared.items():
            kinds = {name: next(iter(values)) for name, values in names.items() if len(values) == 1}
            getattr(found, kind).update({name: value for name, value in kinds.items() if value})
        for values in declared.values():
            values.clear()
    return found


def _fields(owner: ast.ClassDef, known: Known) -> Iterator[tuple[str, str]]:
    """The fields that a class declares, and those that its __init__ assigns."""
    for each in owner.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id, _annotated(each.annotation, known)
        elif isinstance(each, ast.FunctionDef) and each.name == "__init__":
            yield from _assigned_fields(each, known)


def _assigned_fields(init: ast.FunctionDef, known: Known) -> Iterator[tuple[str, str]]:
    arguments = {each.arg: _annotated(each.annotation, known) for each in _arguments(init.args)}
    for node in ast.walk(init):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = (
                    zip(target.elts, node.value.elts, strict=True)
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                    else [(target, node.value)]
                )
                for one, value in pairs:
                    if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self":
                        yield one.attr, _Scope(arguments, known, {}).kind(value)


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _annotated(annotation: ast.expr | None, known: Known) -> str:
    match annotation:
        case ast.Name(id="Path") | ast.Constant(value="Path"):
            return PATH
        case ast.Name(id=name):
            return known.aliases.get(name, "")
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            kinds = {_annotated(left, known), _annotated(right, known)} - {""}
            return kinds.pop() if kinds and "str" not in ast.unparse(annotation) else ""
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, *_])):
            return _annotated(inner, known)
        case ast.Subscript(
            value=ast.Name(id="list" | "set" | "tuple" | "Sequence" | "Iterable" | "Iterator" | "Collection"),
            slice=inner,
        ):
            first = inner.elts[0] if isinstance(inner, ast.Tuple) and _alike(inner) else inner
            return PATHS if _annotated(first, known) == PATH else ""
    return ""


def _alike(inner: ast.Tuple) -> bool:
    return len({ast.unparse(each) for each in inner.elts} - {"..."}) == 1


class _Scope:
    """What names mean at one place; `own`: the fields of the class around it."""

    def __init__(self, names: Kinds, known: Known, own: Kinds) -> None:
        self.names, self.own, self._known = names, own, known

    def kind(self, node: ast.expr | None) -> str:
        match node:
            case ast.Name(id=name):
                return self.names.get(name, "")
            case ast.NamedExpr(value=value) | ast.Starred(value=value) | ast.Await(value=value):
                return self.kind(value)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return PATH if PATH in (self.kind(left), self._full(right)) else ""
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                kinds = {self.kind(left), self.kind(right)}
                return next((kind for kind in (PATHS, NAMES, PATH) if kind in kinds), "")
            case ast.Attribute(value=value, attr=name):
                if name in PARTS and self.kind(value) == PATH:
                    return PATH
                if name in ("parts", "parents") and self.kind(value) == PATH:
                    return NAMES
                if name in ("files", "folders") and "listing" in ast.unparse(value):
                    return PATHS if name == "files" else NAMES
                if isinstance(value, ast.Name) and value.id == "self" and name in self.own:
                    return self.own[name]
                return self._known.fields.get(name, "")
            case ast.Subscript(value=value, slice=index):
                kind = self.kind(value)
                return PATH if kind in (PATHS, NAMES) and not isinstance(index, ast.Slice) else kind
            case ast.IfExp(body=one, orelse=other):
                return self.kind(one) or self.kind(other)
            case ast.BoolOp(values=values):
                return next((kind for value in values if (kind := self.kind(value))), "")
            case ast.List(elts=elts) | ast.Tuple(elts=elts) | ast.Set(elts=elts):
                return PATHS if any(self.kind(each) for each in elts) else ""
            case (
                ast.GeneratorExp(elt=elt, generators=generators)
                | ast.ListComp(elt=elt, generators=generators)
            ):
                return PATHS if self.inside(generators).kind(elt) == PATH else ""
            case ast.SetComp(elt=elt, generators=generators):
                return PATHS if self.inside(generators).kind(elt) == PATH else ""
            case ast.Call(func=ast.Name(id=name), args=arguments):
                if name == "Path":
                    return PATH
                if name in ORDERED and arguments:
                    kind = self.kind(arguments[0])
                    return PATH if kind and name in ("next", "min", "max") else kind
                return self._known.functions.get(name, "")
            case ast.Call(func=ast.Attribute(value=value, attr=name)):
                if name in ("cwd", "home") and ast.unparse(value) == "Path":
                    return PATH
                kind = self.kind(value)
                if kind == PATH and name in MANY:
                    return PATHS
                if kind == PATH and name in SAME:
                    return PATH
                return self._known.functions.get(name, "") if name not in SAME | MANY else ""
        return ""

    def _full(self, node: ast.expr) -> str:
        """Kind of the right side of a division: only a path itself tells that it is no division of numbers."""
        return self.kind(node) if isinstance(node, ast.Call) else ""

    def inside(self, generators: list[ast.comprehension]) -> "_Scope":
        scope = _Scope(dict(self.names), self._known, self.own)
        for each in generators:
            scope.bind(each.target, scope.item(each.iter))
            for condition in each.ifs:
                scope.bind_walrus(condition)
        return scope

    def item(self, node: ast.expr) -> str:
        """Kind of what iterating over an expression gives."""
        return PATH if self.kind(node) in (PATHS, NAMES) else ""

    def bind(self, target: ast.expr, kind: str) -> None:
        if isinstance(target, ast.Name):
            if kind:
                self.names[target.id] = kind
            else:
                self.names.pop(target.id, None)
        elif isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self.bind(each, "")

    def bind_walrus(self, node: ast.AST) -> None:
        for each in ast.walk(node):
            if isinstance(each, ast.NamedExpr):
                self.bind(each.target, self.kind(each.value))


class _Finder:
    """Walks a module in the order of its statements and keeps what the names mean."""

    def __init__(self, known: Known) -> None:
        self.known = known
        self.found: list[Finding] = []

    def body(self, statements: Iterable[ast.stmt], scope: _Scope) -> None:
        for statement in statements:
            self.statement(statement, scope)

    def statement(self, node: ast.stmt, scope: _Scope) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                names = dict(scope.names)
                for each in _arguments(node.args):
                    names.pop(each.arg, None)
                    if kind := _annotated(each.annotation, self.known):
                        names[each.arg] = kind
                self.body(node.body, _Scope(names, self.known, scope.own))
                return
            case ast.ClassDef():
                self.body(node.body, _Scope(dict(scope.names), self.known, dict(_fields(node, self.known))))
                return
            case ast.Assign(targets=targets, value=value):
                self.expression(value, scope, naming=False)
                for target in targets:
                    if (
                        isinstance(target, ast.Tuple)
                        and isinstance(value, ast.Tuple)
                        and len(target.elts) == len(value.elts)
                    ):
                        for one, each in zip(target.elts, value.elts, strict=True):
                            scope.bind(one, scope.kind(each))
                    else:
                        scope.bind(target, scope.kind(value))
                return
            case ast.AnnAssign(target=target, annotation=annotation, value=value):
                if value:
                    self.expression(value, scope, naming=False)
                scope.bind(target, _annotated(annotation, self.known) or scope.kind(value))
                return
            case ast.For(target=target, iter=items):
                self.expression(items, scope, naming=False)
                scope.bind(target, scope.item(items))
                self.body([*node.body, *node.orelse], scope)
                return
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.stmt():
                    self.statement(child, scope)
                case ast.expr():
                    self.expression(child, scope, naming=False)
                case ast.ExceptHandler() | ast.match_case():
                    self.body(child.body, scope)
                case ast.withitem():
                    self.expression(child.context_expr, scope, naming=False)

    def expression(self, node: ast.AST, scope: _Scope, *, naming: bool) -> None:
        """Look for paths that become text; `naming`: the text is the name of a path again."""
        match node:
            case ast.NamedExpr(target=target, value=value):
                self.expression(value, scope, naming=naming)
                scope.bind(target, scope.kind(value))
                return
            case ast.JoinedStr(values=values) if not naming:
                for each in values:
                    if isinstance(each, ast.FormattedValue):
                        if scope.kind(each.value) == PATH:
                            self.add(each.value, "f-string")
                        self.expression(each.value, scope, naming=False)
                return
            case ast.JoinedStr():
                return
            case ast.GeneratorExp() | ast.ListComp() | ast.SetComp() | ast.DictComp():
                inner = scope.inside(node.generators)
                for each in node.generators:
                    self.expression(each.iter, scope, naming=False)
                    for condition in each.ifs:
                        self.expression(condition, inner, naming=False)
                for part in ("elt", "key", "value"):
                    if each := getattr(node, part, None):
                        self.expression(each, inner, naming=naming)
                return
            case ast.Lambda(args=arguments, body=body):
                names = {
                    name: kind
                    for name, kind in scope.names.items()
                    if name not in {a.arg for a in _arguments(arguments)}
                }
                self.expression(body, _Scope(names, self.known, scope.own), naming=False)
                return
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                self.expression(left, scope, naming=False)
                self.expression(right, scope, naming=scope.kind(left) == PATH)
                return
            case ast.BinOp(left=ast.Constant(value=str()), op=ast.Mod(), right=right):
                for each in right.elts if isinstance(right, ast.Tuple) else [right]:
                    if scope.kind(each) == PATH:
                        self.add(each, "%")
            case ast.Call(func=function, args=arguments, keywords=keywords):
                self.call(node, function, arguments, scope)
                name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
                self.expression(function, scope, naming=False)
                for each in arguments:
                    self.expression(each, scope, naming=name in NAMING)
                for keyword in keywords:
                    self.expression(keyword.value, scope, naming=False)
                return
        for child in ast.iter_child_nodes(node):
            self.expression(child, scope, naming=naming)

    def call(self, node: ast.Call, function: ast.expr, arguments: list[ast.expr], scope: _Scope) -> None:
        match function, arguments:
            case ast.Name(id="str" | "repr"), [one] if scope.kind(one) == PATH:
                self.add(node, "str()")
            case ast.Name(id="map"), [ast.Name(id="str" | "repr"), some] if scope.kind(some):
                self.add(node, "map(str)")
            case ast.Name(id="print"), _:
                for each in arguments:
                    if scope.kind(each) == PATH:
                        self.add(each, "print()")
            case ast.Attribute(value=ast.Name(id="log" | "logging"), attr=name), _ if name in LOGGING:
                for each in arguments:
                    if scope.kind(each) == PATH:
                        self.add(each, "log")
            case ast.Attribute(value=value, attr="encode"), _ if scope.kind(value) == PATH:
                self.add(value, ".encode()")
            case ast.Attribute(value=ast.Constant(value=str()), attr="join"), [some] if scope.kind(some):
                self.add(some, "join()")
            case ast.Attribute(value=ast.Constant(value=str()), attr="format"), _:
                for each in arguments:
                    if scope.kind(each) == PATH:
                        self.add(each, "format()")

    def add(self, node: ast.expr, how: str) -> None:
        self.found.append(Finding(node.lineno, node, how))


def findings(tree: ast.Module, known: Known) -> list[Finding]:
    """The places of a module where a path becomes text in another way than by `edge_fl.files.paths`."""
    finder = _Finder(known)
    finder.body(tree.body, _Scope({}, known, {}))
    return finder.found


def in_files(files: Iterable[Path]) -> Iterator[tuple[Path, Finding]]:
    """The findings of source files, which together say what is a path."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in files}
    facts = known(trees.values())
    for path, tree in trees.items():
        yield from ((path, finding) for finding in findings(tree, facts))
