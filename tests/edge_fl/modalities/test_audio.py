"""Recordings of every form become the same clips; a file that is none is named with its reason."""

import io
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_fl.errors import DataError
from edge_fl.inputs import InputSpec
from edge_fl.modalities import UnusableFileError, audio, of
from edge_fl.modalities.limits import FileLimits

Floats = NDArray[np.float32]
SECOND = InputSpec((16000,), (0.0,), (1.0,), axes="T", dtype="float32", rate=16000, hop=8000)


def tone(hertz: float, seconds: float = 1.0, rate: int = 16000) -> Floats:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def wav(x: Floats, rate: int = 16000, bits: int = 16, *, codec: int = 1, extensible: bool = False) -> bytes:
    """A WAV file [T] or [T, channels] with a chunk of notes of an odd size before its data."""
    x = x[:, None] if x.ndim == 1 else x
    if codec == 3:
        data = x.astype(f"<f{bits // 8}").tobytes()
    elif bits == 8:
        data = np.rint(x * 127 + 128).astype(np.uint8).tobytes()
    else:
        whole = np.rint(x.astype(np.float64) * (2 ** (bits - 1) - 1)).astype("<i4")
        data = whole.reshape(-1, 1).view(np.uint8)[:, : bits // 8].tobytes()
    align = x.shape[1] * bits // 8
    form = struct.pack(
        "<HHIIHH", 0xFFFE if extensible else codec, x.shape[1], rate, rate * align, align, bits
    )
    if extensible:
        form += struct.pack("<HHIH", 22, bits, 0, codec) + bytes.fromhex("000000001000800000aa00389b71")
    chunks = [(b"fmt ", form), (b"LIST", b"odd"), (b"data", data)]
    body = b"".join(
        struct.pack("<4sI", name, len(each)) + each + bytes(len(each) % 2) for name, each in chunks
    )
    return struct.pack("<4sI4s", b"RIFF", 4 + len(body), b"WAVE") + body


def read(data: bytes, input: InputSpec | None = SECOND) -> audio.Reading:
    return of("audio").read(io.BytesIO(data), input)


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize(("codec", "bits"), [(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)])
def test_every_form_of_wav_has_the_same_values(codec: int, bits: int, extensible: bool) -> None:
    x = tone(440)
    found = read(wav(x, bits=bits, codec=codec, extensible=extensible))
    assert found.samples.shape == (1, 16000) and found.samples.dtype == np.float32 and found.remarks == ()
    assert np.abs(found.samples[0] - x).max() < (1.5 / 2 ** (bits - 1) if bits < 32 else 1e-6)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 47999, 48000])
def test_another_rate_is_resampled_with_a_remark(rate: int) -> None:
    """The tone stays the same, also in time, but for a rate that counts as its neighbour; no tone above half the rate becomes another."""
    found = read(wav(tone(1000, 1.0, rate), rate, 32, codec=3), None)
    assert found.remarks == (f"{rate} Hz, resampled to 16000 Hz",) and found.samples.shape == (1, 16000)
    assert np.abs(found.samples[0] - tone(1000))[200:-200].max() < (0.1 if rate == 47999 else 1e-4)
    if rate > 20000:
        high = read(wav(tone(9000, 1.0, rate), rate, 32, codec=3), None).samples
        assert np.abs(high[0, 200:-200]).max() < 1e-4


def test_channels_are_mixed_and_quality_is_remarked() -> None:
    both = read(wav(np.stack([tone(440), 0 * tone(440)], 1)))
    assert both.remarks == ("2 channels: mixed to one",)
    assert np.abs(both.samples[0] - tone(440) / 2).max() < 1e-4
    assert read(wav((4 * tone(440)).clip(-1, 1))).remarks == ("clipped",)
    assert read(wav(2 * tone(440))).remarks == ()  # loud, but whole
    assert read(wav(tone(440) / 1000)).remarks == ("silent",)
    assert read(wav(3 * tone(440), 16000, 32, codec=3)).samples.max() == 1


@pytest.mark.parametrize(
    ("length", "hop", "starts"),
    [
        (100, 50, [0]),
        (124, 50, [0]),
        (125, 50, [0, 50]),
        (200, 50, [0, 50, 100]),
        (249, 100, [0, 100]),
        (250, 100, [0, 100, 200]),
        (30, 50, [0]),
        (260, 150, [0, 150]),
        (290, 240, [0, 240]),
    ],
)
def test_a_recording_is_cut_and_a_long_tail_is_padded(length: int, hop: int, starts: list[int]) -> None:
    x = np.arange(1, length + 1, dtype=np.float32)
    input = InputSpec((100,), axes="T", dtype="float32", rate=100, hop=hop)
    padded = np.append(x, np.zeros(400, np.float32))
    assert np.array_equal(audio.clips(x, input), [padded[start : start + 100] for start in starts])


def test_a_short_recording_is_padded_with_a_remark() -> None:
    found = read(wav(tone(440, 0.3)))
    assert found.remarks == ("shorter than a clip of 1 s: padded",)
    assert np.abs(found.samples[0, :4800] - tone(440, 0.3)).max() < 1e-4 and not found.samples[0, 4800:].any()


WHOLE = wav(tone(440))
UNUSABLE = {
    "": "empty",
    "RIFF": "not a WAV or FLAC file",
    "ID3 an MP3 file with the extension .wav": "not a WAV or FLAC file",
    WHOLE[:20]: "truncated",
    WHOLE[:-2]: "truncated",
    WHOLE[: WHOLE.index(b"data")]: "truncated",
    WHOLE.replace(
        b"fmt ", b"form"
    ): "damaged: error: unpack_from requires a buffer of at least 16 bytes",  # detail
    wav(tone(440), 0): "damaged: 0 Hz, 1 channels",
    wav(tone(440)[:0]): "empty",
    wav(tone(440) * np.float32(np.nan), bits=32, codec=3): "values that are not finite",
}


@pytest.mark.parametrize(("data", "reason"), UNUSABLE.items(), ids=range(len(UNUSABLE)))
def test_a_file_that_is_no_recording_is_named(tmp_path: Path, data: bytes | str, reason: str) -> None:
    path = tmp_path / "door.wav"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    with pytest.raises(UnusableFileError) as error:
        audio.read(path, SECOND)
    assert str(error.value).startswith(f"{path}: {reason}") and "unpack" not in error.value.reason
    with pytest.raises(UnusableFileError, match="unreadable") as error:
        audio.check(tmp_path / "missing.wav")
    assert error.value.passing


@given(st.integers(0, 60), st.binary(min_size=1, max_size=8))
def test_a_damaged_header_raises_nothing_else(place: int, junk: bytes) -> None:
    data = WHOLE[:place] + junk + WHOLE[place + len(junk) :]
    try:
        assert read(data).samples.shape[1] == 16000
    except UnusableFileError as error:
        assert error.reason in (
            "damaged", "empty", "truncated", "too large for this board", "not a WAV or FLAC file", audio.FLAC_ADVICE
        )  # fmt: skip


def test_a_recording_whose_size_was_not_known_is_read_to_its_end() -> None:
    """`arecord | tee` writes a header of two gigabytes, a broken one of zero bytes."""
    place = WHOLE.index(b"data") + 4
    for size in (0, 0x7FFFFFFF, 0xFFFFFFFF):
        data = WHOLE[:place] + struct.pack("<I", size) + WHOLE[place + 4 :]
        assert np.array_equal(read(data).samples, read(WHOLE).samples)


def test_a_long_recording_is_rejected_before_it_is_read(tmp_path: Path) -> None:
    (path := tmp_path / "day.wav").write_bytes(wav(tone(440, 30.0, 48000), 48000))
    with pytest.raises(UnusableFileError, match="it needs about 11 MB, allowed are 4 MB") as error:
        audio.check(path, FileLimits(max_decoding_bytes=2**22))
    assert error.value.reason == "too large for this board"
    audio.check(path)


def test_flac_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    for data in (b"fLaC" + bytes(40), wav(tone(440), codec=6, bits=8)):  # 6: A-law
        with pytest.raises(UnusableFileError, match=r"needs pip install 'edge-fl\[audio\]'"):
            read(data)


def test_flac_has_the_values_of_wav() -> None:
    soundfile = pytest.importorskip("soundfile")
    expected, file = read(WHOLE).samples, io.BytesIO()
    soundfile.write(file, expected[0], 16000, format="FLAC", subtype="PCM_16")
    assert np.array_equal(read(file.getvalue()).samples, expected)
    with pytest.raises(UnusableFileError, match=r"damaged|truncated"):
        read(file.getvalue()[: len(file.getvalue()) // 2])


def test_arrays_and_fit_take_clips_only() -> None:
    x = tone(440)[None]
    assert np.array_equal(audio.arrays(x, "x.npz"), x)
    whole = np.array([[-32768, 0, 16384]], np.int16)
    assert audio.arrays(whole, "x.npz").tolist() == [[-1, 0, 0.5]]
    with pytest.raises(DataError, match=r"^x\.npz: clips range over .*, expected -1\.\.1"):
        audio.arrays(3 * x, "x.npz")
    with pytest.raises(DataError, match=r"^x\.npz: clips are float32 \[1, 2, 8000\]"):
        audio.arrays(x.reshape(1, 2, -1), "x.npz")
    assert audio.fit(x, SECOND, "x.npz") is x
    with pytest.raises(DataError, match=r"^x\.npz: samples \[32000\], the extractor takes \[16000\] \[T\]"):
        audio.fit(np.tile(x, 2), SECOND, "x.npz")
    with pytest.raises(DataError, match="recording: clips, but the extractor takes pictures"):
        audio.read(io.BytesIO(WHOLE), InputSpec((1, 8, 8)))


def test_the_input_has_the_spread_of_the_clips() -> None:
    x = np.stack([tone(440), 0 * tone(440)])
    found = audio.input_of(x, np.array([0]), SECOND)
    assert found.std == pytest.approx([0.353553], abs=1e-6) and abs(found.mean[0]) < 1e-6
    assert (found.shape, found.rate, found.hop) == ((16000,), 16000, 8000)
    assert audio.input_of(x, np.array([1]), SECOND).std == (1.0,)  # silence is not divided by zero


def test_clips_are_proposed_by_the_length_of_the_recordings(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.wav" for number in range(4)]
    for path, seconds in zip(files, (0.5, 2.0, 2.5, 0.0), strict=True):
        path.write_bytes(wav(tone(440, seconds)))
    assert audio.propose(files).shape == (32000,) and audio.propose(files).hop == 16000
    assert audio.propose(files[:1]).shape == audio.propose(files[3:]).shape == (16000,)
    found = audio.propose([], 0.5, 8000)
    assert (found.shape, found.rate, found.hop) == ((4000,), 8000, 2000)


def test_synthetic_clips_are_always_the_same() -> None:
    x = audio.synthetic(SECOND, 40, 1)
    assert np.array_equal(x, audio.synthetic(SECOND, 40, 1)) and np.abs(x).max() <= 1


def test_the_page_gets_a_spectrogram_and_a_file_to_play() -> None:
    x = tone(1000)
    levels = audio.spectrogram(x, 16000)
    assert levels.shape == (audio.BANDS, 97) and levels.min() >= 0 and levels.max() <= 1
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + 8000 / 700), audio.BANDS + 2) / 2595) - 1)
    loudest = int(levels.mean(1).argmax())
    assert edges[loudest] < 1000 < edges[loudest + 2]
    assert levels.max() == pytest.approx(1 - 6 / 100, abs=0.01)  # half of full scale is -6 dB
    assert np.abs(read(audio.wav(x, 16000)).samples[0] - x).max() < 1e-4
    assert audio.spectrogram(x[:100], 8000).shape == (audio.BANDS, 1)
