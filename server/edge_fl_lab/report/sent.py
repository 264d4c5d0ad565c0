"""What the devices of a run may send, and what each has sent."""

from collections.abc import Sequence

from msgspec import Struct

from edge_fl.wire.egress import Egress
from edge_fl_server.runs.results import Results


class SentMessage(Struct, frozen=True):
    """A kind of message that devices send, and its content."""

    message: str
    content: str


class SentBytes(Struct, frozen=True):
    """What a device sent in this run: all bytes, and those for sums of class statistics."""

    device: str
    bytes_up: int
    statistics_bytes: int


def by_device(results: Results) -> tuple[SentBytes, ...]:
    """What each device sent; empty for simulated clients."""
    return tuple(
        SentBytes(row["device"], int(row["bytes_up"]), int(row.get("statistics_bytes", 0)))
        for row in results.devices()
        if row["tier"] != "simulated"
    )


def messages(source: str, egress: Sequence[Egress]) -> tuple[SentMessage, ...]:
    """The messages that the egress manifest of each tier allows; none for simulated clients."""
    if source == "simulated":
        return ()
    parts = (
        SentMessage(f"{kind} report of {one.tier} devices", f"tensors of: {', '.join(names) or 'nothing'}")
        for one in egress
        for kind, names in one.parts.items()
    )
    encoding = (
        SentMessage(f"encoding of {one.tier} devices", _encoding(one)) for one in egress if one.tier == "full"
    )
    sums = (
        SentMessage(f"vectors of {one.tier} devices for sums of {subject}", ", ".join(content))
        for one in egress
        for subject, content in one.sums.items()
    )
    messages = {kind: ", ".join(fields) for one in egress for kind, fields in one.messages.items()}
    numbers = dict.fromkeys(number for one in egress for number in one.numbers)
    return (
        *parts,
        *encoding,
        *sums,
        *(SentMessage(*one) for one in messages.items()),
        SentMessage("numbers in a report", ", ".join(numbers)),
    )


def sums(results: Results) -> tuple[SentMessage, ...]:
    """The sum of class statistics that was completed, if any."""
    if (found := results.sum()) is None:
        return ()
    form = "masked: the server knows the sum alone" if found.masked else "plain: the server saw each device's"
    noise = f"; epsilon {found.epsilon:.3g}" if found.epsilon else ""
    content = f"{found.pictures} pictures of {len(found.devices)} devices, {found.bytes_each} bytes of each; {form}{noise}"
    return (SentMessage(f"sum of class statistics on release {found.release}", content),)


def _encoding(egress: Egress) -> str:
    """Compression and noise of the parts that a tier sends."""
    compression, privacy = egress.compression, egress.privacy
    share = f" of {compression.keep:g} of the values" if compression.kind == "topk" else ""
    if not privacy.noise_multiplier:
        return f"compression {compression.kind}{share}; no noise"
    budget = f"epsilon {privacy.budget:g}" if privacy.budget else "no limit"
    return (
        f"compression {compression.kind}{share}; clipped to {privacy.clip:g}, noise multiplier"
        f" {privacy.noise_multiplier:g}, budget per device {budget} at delta {privacy.delta:g}"
    )
