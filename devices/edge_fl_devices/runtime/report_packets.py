"""The packets of a report: the chunks of its blob, then the report itself."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from edge_fl.blob import split
from edge_fl.wire.messages import encode
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import SAFETENSORS, Packet
from edge_fl_devices.agent.effects import Send


def report_packets(
    topics: Topics, device: str, effect: Send, signed: Struct, payload: bytes
) -> Iterator[Packet]:
    """Yield the packets of a report in `effect`; `signed` is the report as it is sent, `payload` its blob's content."""
    parcel, expiry_s = effect.parcel, effect.expiry_s
    if blob := parcel.report.blob:
        for index, chunk in enumerate(split(payload, blob.chunk_bytes)):
            topic = topics.blob(device, parcel.report.id, index)
            yield Packet(topic, bytes(chunk), content_type=SAFETENSORS, expiry_s=expiry_s)
    yield Packet(topics.report(device, parcel.run_id, parcel.round), encode(signed), expiry_s=expiry_s)
