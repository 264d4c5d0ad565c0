"""Values of Sparkplug B payloads (Eclipse Sparkplug 3.0.0, sections 4 and 6.4), of whose protobuf messages only these fields are read.

Topics are spBv1.0/GROUP/TYPE/NODE[/DEVICE]. A birth (NBIRTH, DBIRTH) gives each metric a name, and perhaps an alias, a number of its node by
which later data (NDATA, DDATA) name it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

NAMESPACE = "spBv1.0"
BIRTHS, DATA = ("NBIRTH", "DBIRTH"), ("NDATA", "DDATA")
SIGNED_BITS = {1: 8, 2: 16, 3: 32, 4: 64}
"""Data types Int8 to Int64, which are sent in two's complement as an unsigned number."""
MESSAGES = {
    "Metric": "string name 1, uint64 alias 2, uint64 timestamp 3, uint32 datatype 4, bool is_historical 5, bool is_null 7, uint32 int_value 10,"
    " uint64 long_value 11, float float_value 12, double double_value 13, bool boolean_value 14, string string_value 15",
    "Payload": "uint64 timestamp 1, message metrics 2",
}
VALUES = ("int_value", "long_value", "float_value", "double_value", "boolean_value", "string_value")
Values = dict[str, object]


class Metrics:
    """Reads payloads, and keeps the names and data types that births give to aliases."""

    def __init__(self) -> None:
        self._born: dict[str, dict[int, tuple[str, int]]] = {}

    def read(self, levels: Sequence[str], payload: bytes) -> Iterator[tuple[float | None, Values]]:
        """Yield the new values by name, with their time in seconds, of a message with the topic `levels`.

        Raises ValueError for a payload that cannot be read, and, after all other values, for an alias without a birth.
        """
        if len(levels) < 4 or levels[2] not in (*BIRTHS, *DATA):
            return
        node, found, unborn = f"{levels[1]}/{levels[3]}", dict[int, Values](), list[str]()
        born = self._born.setdefault(node, {})
        if levels[2] == "NBIRTH":
            born.clear()
        try:
            content = _payload().FromString(payload)
        except message.DecodeError as error:
            raise ValueError("no Sparkplug payload") from error
        for metric in content.metrics:
            known = born.get(metric.alias, ("", 0)) if metric.HasField("alias") else ("", 0)
            name, datatype = metric.name or known[0], metric.datatype or known[1]
            if levels[2] in BIRTHS and metric.HasField("alias"):
                born[metric.alias] = name, datatype
            if not name:
                unborn.append(str(metric.alias))
            elif not (metric.is_historical or metric.is_null):
                found.setdefault(metric.timestamp or content.timestamp, {})[name] = _value(metric, datatype)
        for time in sorted(found):
            yield time / 1000 or None, found[time]
        if unborn:
            raise ValueError(f"no birth of {node} names alias {', '.join(unborn)}; let it send one (Rebirth)")


def _value(metric: Any, datatype: int) -> object:
    value: object = next((getattr(metric, name) for name in VALUES if metric.HasField(name)), None)
    if isinstance(value, int) and (bits := SIGNED_BITS.get(datatype)):
        return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
    return value


@cache
def _payload() -> Any:
    """The class of payloads."""
    proto = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="sparkplug_b.proto")
    for name, fields in MESSAGES.items():
        kind = file.message_type.add(name=name)
        for type, field, number in map(str.split, fields.split(",")):
            label = proto.LABEL_REPEATED if type == "message" else proto.LABEL_OPTIONAL
            numbers = {"number": int(number), "label": label, "type": getattr(proto, f"TYPE_{type.upper()}")}
            kind.field.add(name=field, type_name="Metric" if type == "message" else None, **numbers)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Payload"))
