"""Values of Sparkplug B payloads (Eclipse Sparkplug 3.0.0, sections 4 and 6.4), protobuf messages of which only these fields are read.

Topics are spBv1.0/GROUP/TYPE/NODE[/DEVICE]. A birth (NBIRTH, DBIRTH) gives metrics names and aliases, by which data (NDATA, DDATA)
name them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

NAMESPACE = "spBv1.0"
BIRTHS, DATA = ("NBIRTH", "DBIRTH"), ("NDATA", "DDATA")
SIGNED_BITS = {1: 8, 2: 16, 3: 32, 4: 64}
"""Data types Int8 to Int64, which are sent in two's complement as an unsigned number."""
METRIC = "string name 1, uint64 alias 2, uint64 time 3, uint32 type 4, bool old 5, bool null 7"
PAYLOAD = "uint64 time 1, message metrics 2"
VALUES = ("uint32", "uint64", "float", "double", "bool", "string")
"""Types, and here also names, of the fields 10 to 15 of a metric, of which one is its value."""


class Metrics:
    """Reads payloads, and keeps the names and data types that births give to aliases."""

    def __init__(self) -> None:
        self._payload, self._born = _payload(), dict[tuple[str, str, object], tuple[str, int]]()

    def read(self, levels: Sequence[str], payload: bytes) -> Iterator[tuple[float | None, dict[str, object]]]:
        """Yield the new values by name, with their time in seconds, of a message with the topic `levels`.

        Raises ValueError for a payload that cannot be read, and, after all other values, for an alias without a birth.
        """
        if len(levels) < 4 or levels[2] not in (*BIRTHS, *DATA):
            return
        try:
            content = self._payload.FromString(payload)
        except message.DecodeError as error:
            raise ValueError("no Sparkplug payload") from error
        found, unborn = dict[int, dict[str, object]](), list[str]()
        for metric in ({field.name: value for field, value in each.ListFields()} for each in content.metrics):
            alias = (levels[1], levels[3], metric.get("alias"))
            known = self._born.get(alias, ("", 0))
            name, type = metric.get("name", known[0]), metric.get("type", known[1])
            if levels[2] in BIRTHS and "alias" in metric:
                self._born[alias] = name, type
            if not name:
                unborn.append(str(alias[2]))
            elif not (metric.get("old") or metric.get("null")):
                value = next((metric[each] for each in VALUES if each in metric), None)
                if isinstance(value, int) and (bits := SIGNED_BITS.get(type)):
                    value = (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
                found.setdefault(metric.get("time", content.time), {})[name] = value
        for time in sorted(found):
            yield time / 1000 or None, found[time]
        if unborn:
            raise ValueError(
                f"no birth of {levels[3]} names alias {', '.join(unborn)}; let it send one (Rebirth)"
            )


def _payload() -> Any:
    """Build the class of payloads."""
    proto = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="sparkplug_b.proto")
    values = (f"{type} {type} {number}" for number, type in enumerate(VALUES, 10))
    for message_name, fields in (("Metric", f"{METRIC}, {', '.join(values)}"), ("Payload", PAYLOAD)):
        kind = file.message_type.add(name=message_name)
        for type, field, number in map(str.split, fields.split(",")):
            added = kind.field.add(
                name=field, number=int(number), type=getattr(proto, f"TYPE_{type.upper()}")
            )
            added.label = proto.LABEL_REPEATED if type == "message" else proto.LABEL_OPTIONAL
            if type == "message":
                added.type_name = "Metric"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Payload"))
