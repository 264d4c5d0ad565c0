"""A blob arrives whole from any order of chunks, and no wrong byte gets in."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_fl.blob import MAX_BLOB_BYTES, Assembly, Blob, describe, split
from edge_fl.errors import ArtefactError

SMALL = 1024
payloads = st.builds(
    lambda seed, size: (seed * size)[:size], st.binary(min_size=1, max_size=64), st.integers(1, 5 * SMALL)
)


@given(payloads, st.integers(SMALL, 2 * SMALL), st.randoms(use_true_random=False))
def test_chunks_in_any_order_make_the_whole(payload: bytes, chunk_bytes: int, random: object) -> None:
    blob = describe(payload, chunk_bytes)
    chunks = list(enumerate(split(payload, chunk_bytes)))
    random.shuffle(chunks)  # type: ignore[attr-defined]
    assembly = Assembly(blob)
    for number, (index, chunk) in enumerate(chunks, start=1):
        assert index in assembly.missing
        assert assembly.add(index, bytes(chunk)) is (number == len(chunks))
    assert assembly.missing == []
    assert assembly.join() == payload


@given(payloads)
def test_a_descriptor_survives_the_wire(payload: bytes) -> None:
    blob = describe(payload, SMALL)
    assert msgspec.json.decode(msgspec.json.encode(blob), type=Blob) == blob


@given(payloads, st.data())
def test_a_corrupt_chunk_is_refused_and_can_come_again(payload: bytes, data: st.DataObject) -> None:
    blob, chunks = describe(payload, SMALL), [bytes(chunk) for chunk in split(payload, SMALL)]
    index = data.draw(st.integers(0, len(chunks) - 1))
    place = data.draw(st.integers(0, len(chunks[index]) - 1))
    wrong = bytearray(chunks[index])
    wrong[place] ^= data.draw(st.integers(1, 255))
    assembly = Assembly(blob)
    with pytest.raises(ArtefactError, match=f"chunk {index}: sha256 .* not used"):
        assembly.add(index, bytes(wrong))
    assert index in assembly.missing
    for number, chunk in enumerate(chunks):
        assembly.add(number, chunk)
    assert assembly.join() == payload


@pytest.mark.parametrize("change", [lambda c: c[:-1], lambda c: c + b"x", lambda c: b""])
@pytest.mark.parametrize("index", [0, 2])
def test_a_chunk_of_the_wrong_length_is_refused(change: object, index: int) -> None:
    payload = bytes(2 * SMALL + 7)
    chunk = bytes(split(payload, SMALL)[index])
    with pytest.raises(ArtefactError, match=r"bytes, expected (1024|7); not used"):
        Assembly(describe(payload, SMALL)).add(index, change(chunk))  # type: ignore[operator]


@pytest.mark.parametrize("index", [-1, 3, 2**40])
def test_a_chunk_that_the_blob_does_not_have_is_refused(index: int) -> None:
    payload = bytes(2 * SMALL + 7)
    with pytest.raises(ArtefactError, match=f"unexpected chunk {index} of 3"):
        Assembly(describe(payload, SMALL)).add(index, bytes(SMALL))


def test_a_chunk_may_come_twice() -> None:
    payload = bytes(SMALL) + b"end"
    assembly = Assembly(describe(payload, SMALL))
    assert not assembly.add(1, b"end")
    assert not assembly.add(1, b"end")
    assert assembly.add(0, bytes(SMALL))


def test_an_incomplete_blob_is_not_used() -> None:
    assembly = Assembly(describe(bytes(SMALL) + b"end", SMALL))
    assembly.add(0, bytes(SMALL))
    with pytest.raises(ArtefactError, match="1024 of 1027 bytes match; not used"):
        assembly.join()


def test_right_chunks_of_a_wrong_whole_are_not_used() -> None:
    first, second = describe(b"first"), describe(b"other")
    assembly = Assembly(msgspec.structs.replace(first, chunks=second.chunks))
    assert assembly.add(0, b"other")
    with pytest.raises(ArtefactError, match="not used"):
        assembly.join()


@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_a_descriptor_with_too_few_or_too_many_chunks_is_refused(chunks: int) -> None:
    raw = msgspec.to_builtins(describe(bytes(SMALL + 1), SMALL)) | {"chunks": ["0" * 64] * chunks}
    with pytest.raises(msgspec.ValidationError, match=f"1025 bytes in {chunks} chunks, expected 2"):
        msgspec.convert(raw, Blob)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sha256", "0" * 63),
        ("sha256", "0" * 64 + "\n"),
        ("sha256", "A" * 64),
        ("bytes", 0),
        ("bytes", -1),
        ("bytes", MAX_BLOB_BYTES + 1),
        ("chunk_bytes", 0),
        ("chunk_bytes", 512 * 1024),
        ("chunks", ["../../etc/passwd"]),
        ("surprise", 1),
    ],
)
def test_a_descriptor_with_a_wrong_field_is_refused(field: str, value: object) -> None:
    raw = msgspec.to_builtins(describe(b"payload")) | {field: value}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(raw, Blob)


def test_nothing_and_too_much_are_not_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_fl.blob.MAX_BLOB_BYTES", 10)
    for payload in (b"", bytes(11)):
        with pytest.raises(ArtefactError, match="expected 1 to 10; not sent"):
            describe(payload)
    assert describe(bytes(10)).bytes == 10
