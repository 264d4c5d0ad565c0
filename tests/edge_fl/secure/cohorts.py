"""Cohorts of `SumDevice` with enrolled identities, and a server between them: every message is encoded, decoded and recorded."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edge_fl.blob import split
from edge_fl.errors import SecureSumError
from edge_fl.secure import fixed_point
from edge_fl.secure.device import SumAnswer, SumDevice
from edge_fl.secure.fixed_point import Vector
from edge_fl.secure.server import Sum, SumServer
from edge_fl.secure.terms import Member
from edge_fl.seeds import generator
from edge_fl.wire.messages import SumReply, SumRequest, SumStep, decode, encode
from edge_fl_broker.provision.authority import Authority

FLEET = "mill"
LENGTH = 50
REQUEST = SumRequest("statistics", 7, LENGTH)


def names_of(count: int) -> list[str]:
    return [f"pi-{number:02}" for number in range(count)]


def members(folder: Path, count: int) -> dict[str, Member]:
    """Devices with certificates of one CA."""
    authority, names = Authority.make(folder / "home"), names_of(count)
    authority.bake({name: folder / name for name in names})
    return {name: Member.of(folder / name) for name in names}


def vectors(count: int, length: int, seed: int = 3) -> dict[str, Vector]:
    """Vectors like class statistics: small sums and large counts."""
    rng = generator(seed, "secure", "vectors")
    scale = np.where(np.arange(length) % 10 == 0, 2000.0, 1.0)
    return {name: rng.normal(size=length) * scale for name in names_of(count)}


def encodings(vector: Vector, devices: int) -> list[bytes]:
    """Four consecutive numbers of a vector in every encoding that the project uses."""
    pieces = [vector[start : start + 4] for start in (0, 7, len(vector) - 4)]
    found = [piece.astype(kind).tobytes() for piece in pieces for kind in ("<f4", "<f8", ">f4", ">f8", "<f2")]
    numbers = fixed_point.encode(vector, devices)
    found += [fixed_point.to_bytes(numbers[start : start + 4]) for start in (0, 7, len(vector) - 4)]
    return [*found, numbers[:4].astype("<u8").tobytes()]


@dataclass
class Cohort:
    """Devices and a server. `tamper` may change a step before its device receives it; `gone` devices do not answer a stage."""

    members: Mapping[str, Member]
    vectors: Mapping[str, Vector]
    request: SumRequest
    options: Callable[[str], dict[str, Any]] = lambda name: {}  # of a device
    gone: dict[str, Collection[str]] = field(default_factory=dict)  # by the stage of the step
    tamper: Callable[[str, SumStep], SumStep] = lambda name, step: step
    tamper_reply: Callable[[str, SumAnswer], SumAnswer] = lambda name, answer: answer
    server_options: dict[str, Any] = field(default_factory=dict)
    id: str = "sum-1"
    traffic: list[bytes] = field(default_factory=list)
    errors: dict[str, SecureSumError] = field(default_factory=dict)  # of devices
    rejections: list[SecureSumError] = field(default_factory=list)  # of the server

    def __post_init__(self) -> None:
        masked = self.request.masked
        self.devices = {
            name: SumDevice(
                FLEET,
                name,
                self.id,
                self.request,
                vector,
                self.members[name] if masked else None,
                **self.options(name),
            )
            for name, vector in self.vectors.items()
        }
        authorities = next(iter(self.members.values())).authorities if masked else ()
        self.server = SumServer(
            FLEET, self.id, self.request, self.vectors, authorities, **self.server_options
        )

    def run(self) -> Sum:
        """All stages. Raises what the server raises."""
        steps = self.server.open()
        while steps:
            for name, step in sorted(steps.items()):
                self._exchange(name, self.tamper(name, step))
            steps = self.server.advance()
        assert self.server.result
        return self.server.result

    def _exchange(self, name: str, step: SumStep) -> None:
        if any(name in self.gone.get(stage, ()) for stage in (step.stage, *_before(step.stage))):
            return
        payload = encode(step)
        self.traffic.append(payload)
        try:
            answer = self.devices[name].answer(decode(payload, SumStep))
            if answer:
                self._take(name, self.tamper_reply(name, answer))
        except SecureSumError as error:
            self.errors[name] = error
            self.server.take(name, SumReply(self.id, "declined", reason=error.why))

    def _take(self, name: str, answer: SumAnswer) -> None:
        payload = encode(answer.reply)
        self.traffic += [payload, answer.payload]
        try:
            self.server.take(name, decode(payload, SumReply))
            if blob := answer.reply.blob:
                for index, chunk in enumerate(split(answer.payload, blob.chunk_bytes)):
                    self.server.take_chunk(name, self.id, index, bytes(chunk))
        except SecureSumError as error:
            self.rejections.append(error)


STAGES = ("open", "peers", "shares", "survivors", "signatures")


def _before(stage: str) -> tuple[str, ...]:
    return STAGES[: STAGES.index(stage)]


def some(thirty: Mapping[str, Member], count: int = 8, **options: Any) -> Cohort:
    """A small cohort."""
    return Cohort(thirty, **{"vectors": vectors(count, LENGTH), "request": REQUEST, **options})


def total(cohort: Cohort, names: Any) -> Vector:
    return np.sum([cohort.vectors[name] for name in names], axis=0)
