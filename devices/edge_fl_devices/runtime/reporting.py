"""The reports of one device: sends them and counts them, and the acknowledgements of the server."""

from collections import Counter
from collections.abc import Iterator
from functools import partial

from edge_fl.wire.messages import Ack, Report, encode
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import SAFETENSORS, Packet, chunk_packets
from edge_fl_devices.agent.effects import Send
from edge_fl_devices.runtime.signatures import StatementSigner
from edge_fl_devices.storage.store import Store


class Reporting:
    """last: the last report sent, by kind. totals: sums over all reports. acknowledged: acknowledgements by status."""

    def __init__(self, device: str, topics: Topics, store: Store, signer: StatementSigner) -> None:
        self.last: dict[str, Report] = {}
        self.totals: Counter[str] = Counter()
        self.acknowledged: Counter[str] = Counter()
        self._device, self._topics, self._store, self._signer = device, topics, store, signer

    def packets(self, effect: Send) -> Iterator[Packet]:
        """Yield the packets of a report, the chunks of its blob first."""
        parcel, expiry_s = effect.parcel, effect.expiry_s
        report = parcel.report
        self._count(report)
        if blob := report.blob:
            topics = partial(self._topics.blob, self._device, report.id)
            payload = self._store.blob(report.id) or b""
            yield from chunk_packets(
                topics, payload, blob.chunk_bytes, content_type=SAFETENSORS, expiry_s=expiry_s
            )
        topic = self._topics.report(self._device, parcel.run_id, parcel.round)
        yield Packet(topic, encode(self._signer.signed(report)), expiry_s=expiry_s)

    def acknowledge(self, ack: Ack) -> None:
        """Count an acknowledgement."""
        self.acknowledged[ack.status] += 1

    def _count(self, report: Report) -> None:
        """Add a report to the totals, once."""
        if (last := self.last.get(report.kind)) and last.id == report.id:
            return
        self.last[report.kind] = report
        self.totals.update(
            reports=1,
            bytes_down=report.bytes_down,
            bytes_up=report.bytes_up,
            milliseconds=round(1000 * report.seconds),
        )
