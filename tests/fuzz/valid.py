"""Valid values of any msgspec type, derived from its type, so that new messages and fields are fuzzed without changes here."""

from functools import cache
from typing import Any

from hypothesis import strategies as st
from msgspec import Struct, inspect

from edge_fl.blob import Blob, describe
from edge_fl.inputs import KINDS, InputSpec


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Values of a msgspec type."""
    match kind:
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return st.integers(
                kind.ge if kind.ge is not None else -(2**40), kind.le if kind.le is not None else 2**40
            )
        case inspect.FloatType():
            low, high = (
                kind.ge if kind.ge is not None else kind.gt,
                kind.le if kind.le is not None else kind.lt,
            )
            finite = st.floats(low, high, allow_nan=False, allow_infinity=False)
            return finite.filter(lambda x: x != kind.gt and x != kind.lt)
        case inspect.StrType():
            return st.from_regex(kind.pattern) if kind.pattern else st.text(max_size=20)
        case inspect.BytesType():
            return st.binary(max_size=min(kind.max_length or 20, 20))
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.ListType() | inspect.VarTupleType():
            items = st.lists(values(kind.item_type), max_size=3)
            return items.map(tuple) if isinstance(kind, inspect.VarTupleType) else items
        case inspect.TupleType():
            return st.tuples(*map(values, kind.item_types))
        case inspect.DictType():
            return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=3)
        case inspect.UnionType():
            return st.one_of(*map(values, kind.types))
        case inspect.StructType(cls=cls) if cls is Blob:
            return st.binary(min_size=1, max_size=3000).map(lambda payload: describe(payload, 1024))
        case inspect.StructType(cls=cls) if cls is InputSpec:
            return st.sampled_from(sorted(KINDS)).flatmap(_inputs)
        case inspect.StructType(cls=cls):
            fields = st.fixed_dictionaries({field.name: values(field.type) for field in kind.fields})
            return fields.map(lambda drawn: _built(cls, drawn)).filter(lambda struct: struct is not None)
    raise NotImplementedError(kind)


def _inputs(axes: str) -> st.SearchStrategy[InputSpec]:
    in_time = "T" in axes
    return st.builds(
        InputSpec,
        st.tuples(*[st.integers(1, 16)] * len(axes)),
        st.lists(st.floats(-1, 1), max_size=3).map(tuple),
        st.lists(st.floats(0.01, 1), max_size=3).map(tuple),
        st.just(axes),
        st.just(KINDS[axes][1]),
        st.sampled_from(["crop", "letterbox", "stretch"]),
        st.floats(0.01, 1e6) if in_time else st.just(0.0),
        st.integers(1, 1000) if in_time else st.just(0),
    )


@cache
def structs(kind: type[Struct]) -> st.SearchStrategy[Any]:
    """Valid structs of one class."""
    return values(inspect.type_info(kind))


def _built(cls: type[Struct], fields: dict[str, Any]) -> Struct | None:
    """Build the struct; for contradictory fields the one with defaults, or None if there is none."""
    for chosen in (fields, {}):
        try:
            return cls(**chosen)
        except (ValueError, TypeError):
            continue
    return None
