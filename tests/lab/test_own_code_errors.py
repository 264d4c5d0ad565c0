"""What is said of a user's own model or method that is wrong: which one, what came, what was expected, and the line of the user's file."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_fl import cli
from edge_fl.errors import MethodError, RunError
from edge_fl_lab.research import compare, run
from edge_fl_server.orchestrate import execution, own_code
from edge_fl_server.recipes.recipe import Recipe, with_settings
from edge_fl_server.training.engines import processes

LABELS = np.arange(90) % 3
IMAGES = np.random.default_rng(0).random((90, 8, 8)) / 4 + LABELS[:, None, None] / 4
SMALL = ["--dataset", "digits", "--clients", "3", "--rounds", "1", "--set", "data.fraction=0.2"]

MODELS = """
import torch
from torch import nn

class Good(nn.Module):
    def __init__(self, input):
        super().__init__()
        self.feature_dim = 8
        self.layer, self.norm = nn.Conv2d(input.channels, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x):
        return self.out(self.norm(self.layer(x)).mean((2, 3)))

    def out(self, z):
        return z

class Narrow(Good):
    def out(self, z):
        return z[:, :5]

class Two(Good):
    def out(self, z):
        return z, z

class Map(Good):
    def forward(self, x):
        return self.layer(x)

class Double(Good):
    def out(self, z):
        return z.double()

class Infinite(Good):
    def out(self, z):
        return torch.log(-z.abs())

class Unlearned(Good):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)

class Training(Good):
    def out(self, z):
        return z[None] if self.training else z

class Typo(Good):
    def out(self, z):
        return z / undefined

class Large(nn.Module):
    def __init__(self, input):
        super().__init__()
        self.feature_dim = 8
        self.layer = nn.Linear(28 * 28, 8)

    def forward(self, x):
        return self.layer(x.flatten(1))

class NoSuper(nn.Module):
    def __init__(self, input):
        self.layer = nn.Linear(3, 3)

class Misnamed(nn.Module):
    def __init__(self, input):
        super().__init__()
        self.pixels = input.hieght

class NoInput(nn.Module):
    def __init__(self):
        super().__init__()

class NoWidth(nn.Module):
    def __init__(self, input):
        super().__init__()

class NoForward(Good):
    forward = nn.Module.forward

def number(input):
    return 3

class Branching(Good):
    def out(self, z):
        if z.sum() > 0:
            return z * 2
        return z
"""
SIZE = "for 2 samples of 1x8x8"
FORM = r"expected one float32 tensor \[2, 8\], \[samples, feature_dim\]; nothing was run"
WRONG_MODELS = {
    "Narrow": rf"model wrong:Narrow with inference behaviour, {SIZE}: its result is \[2, 5\], {FORM}",
    "Two": rf"its result is a tuple of 2, {FORM}",
    "Map": rf"its result is \[2, 8, 6, 6\], {FORM}",
    "Double": rf"its result is float64 \[2, 8\], {FORM}",
    "Infinite": rf"its result has 16 NaN or infinite values, {FORM}",
    "Training": rf"model wrong:Training with training behaviour, {SIZE}: its result is \[1, 2, 8\], {FORM}",
    "Unlearned": 'its result has no gradient, so nothing would be trained .*; expected one, or model.train = "none"',
    "Typo": r'wrong\.py:\d+, "return z / undefined": NameError: name \'undefined\' is not defined; nothing was run',
    "Large": rf'{SIZE}: wrong\.py:\d+, "return self\.layer\(x\.flatten\(1\)\)": RuntimeError: .*2x64 and 784x8',
    "NoSuper": r'for pictures 1x8x8: wrong\.py:\d+, "self\.layer = nn\.Linear\(3, 3\)": AttributeError: cannot assign module before',
    "Misnamed": r'wrong\.py:\d+, "self\.pixels = input\.hieght": AttributeError',
    "NoInput": r"takes 1 positional argument but 2 were given, called with \(input\)",
    "NoWidth": "feature_dim = None, expected a torch module with an int attribute feature_dim",
    "NoForward": 'missing the required "forward" function',
    "number": "model wrong:number: int, expected a torch module with an int attribute feature_dim",
}

METHODS = """
from dataclasses import dataclass
from edge_fl.learn.network.part import personal, shared
from edge_fl.methods.contract.method import SHARED_MODEL, Method

@dataclass(frozen=True)
class Base(Method):
    title, citation, family = "Base", "ours", "global model"
    has_global, parts = True, SHARED_MODEL

    def local_update(self, down, own, data):
        return self.result(self.train(self.loss, down, data), own)

    def result(self, new, own):
        return new, own

@dataclass(frozen=True)
class Nothing(Base):
    def result(self, new, own):
        pass

@dataclass(frozen=True)
class OnlyUp(Base):
    def result(self, new, own):
        return new

@dataclass(frozen=True)
class Misnamed(Base):
    def result(self, new, own):
        return {"extractor": new["extractor"], "haed": new["head"]}, own

@dataclass(frozen=True)
class Flat(Base):
    def result(self, new, own):
        return {**new, "head": new["head"]["weight"]}, own

@dataclass(frozen=True)
class Forgetful(Base):
    parts = {"extractor": shared(), "head": personal()}

    def local_update(self, down, own, data):
        return {"extractor": self.train(self.loss, {**down, **own}, data)["extractor"]}, {}

@dataclass(frozen=True)
class InPlace(Base):
    def local_update(self, down, own, data):
        for name, tensor in self.train(self.loss, down, data)["head"].items():
            down["head"][name].copy_(tensor)
        return down, own

@dataclass(frozen=True)
class Replacing(Base):
    def local_update(self, down, own, data):
        down.update(self.train(self.loss, down, data), more={})
        return {"extractor": down["extractor"], "head": down["head"]}, own

@dataclass(frozen=True)
class Typo(Base):
    def result(self, new, own):
        return new, owm

@dataclass(frozen=True)
class Stateful(Base):
    def result(self, new, own):
        self.memory = new
        return new, own

@dataclass(frozen=True)
class Sum(Base):
    def aggregate(self, shared, updates):
        return wieghted(shared, updates)

@dataclass(frozen=True)
class NoSum(Base):
    def aggregate(self, shared, updates):
        return [*updates][0]

@dataclass(frozen=True)
class Tall(Base):
    def predict(self, parts, x):
        return self.classify(parts, x)[:, :, None]

@dataclass(frozen=True)
class Guess(Base):
    def predict(self, parts, x):
        return self.classify(parts, x).softmx(1)

@dataclass(frozen=True)
class Last(Base):
    def personalise(self, down, own, data):
        return own

@dataclass(frozen=True)
class Indirect(Base):
    def after_training(self, down, up):
        return {"head": up["head"]}
"""
DICTS = r"expected \(up, own\): two dicts of a part's name -> dict of tensors; the run stopped"
WRONG_METHODS = {
    "Nothing": f"Base: local_update returned NoneType, {DICTS}",
    "OnlyUp": f"Base: local_update returned dict, {DICTS}",
    "Flat": f"Base: local_update returned Tensor as part 'head', {DICTS}",
    "Misnamed": "returned the part 'haed', expected parts that it declares: extractor, head",
    "Forgetful": "returned no personal part 'head', expected all that it declares: head",
    "InPlace": r"Base: local_update changed down\['head'\], which others use too; expected a copy, as of tree\.clone\(down\)",
    "Replacing": r"Base: local_update changed down\['extractor'\], which others use too",
    "Typo": r'Base, client c000, round 1: wrongly\.py:\d+, "return new, owm": NameError: .*; the run stopped',
    "Stateful": r'wrongly\.py:\d+, "self\.memory = new": FrozenInstanceError',
    "Sum": r'Base: wrongly\.py:\d+, "return wieghted\(shared, updates\)": NameError',
    "NoSum": "Base: aggregate returned Update, expected a dict",
    "Tall": r"a prediction is \[\d+, \d+, 1\], expected logits \[\d+, \d+\], \[samples, classes\]",
    "Guess": r'wrongly\.py:\d+, "return self\.classify\(parts, x\)\.softmx\(1\)": AttributeError',
    "Last": f"Base: personalise returned dict, {DICTS}",
    "Indirect": r"KeyError: 'extractor' \(\w+\.py:\d+\), probably because of what wrongly:Indirect returned",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with `wrong.py` (models) and `wrongly.py` (methods), which no process has imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for name, code in (("wrong", MODELS), ("wrongly", METHODS), ("wrongly_pooled", METHODS)):
        (tmp_path / f"{name}.py").write_text(code)
        sys.modules.pop(name, None)
    return tmp_path


@pytest.mark.parametrize("name", WRONG_MODELS)
def test_a_wrong_model_is_one_line_before_any_round(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *SMALL, "--model", f"wrong:{name}"]) == 4
    said = capsys.readouterr().err
    assert re.search(WRONG_MODELS[name], said) and said.count("\n") == 1, said
    with pytest.raises(MethodError, match=WRONG_MODELS[name]):
        run("fedrep", IMAGES, LABELS, clients=3, model=f"wrong:{name}")
    with pytest.raises(MethodError, match=WRONG_MODELS[name]):
        compare(["fedrep"], IMAGES, LABELS, clients=3, model=f"wrong:{name}")
    assert not Path("runs").exists()


def test_a_good_model_and_one_that_is_not_trained_run() -> None:
    run("fedrep", IMAGES, LABELS, clients=3, rounds=1, model="wrong:Good")
    settings = {"model.train": "none"}
    run("fedrep", IMAGES, LABELS, clients=3, rounds=1, model="wrong:Unlearned", settings=settings)


@pytest.mark.parametrize("name", WRONG_METHODS)
def test_a_wrong_method_names_what_came_or_the_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *SMALL, "--method", f"wrongly:{name}"]) in (1, 4)
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.search(WRONG_METHODS[name], said) and "bug" not in said, said
    with pytest.raises((MethodError, RunError), match=WRONG_METHODS[name]):
        run(f"wrongly:{name}", IMAGES, LABELS, clients=3, rounds=1)
    with pytest.raises(RunError, match=WRONG_METHODS[name].replace("; the run stopped", "")):
        compare([f"wrongly:{name}"], IMAGES, LABELS, clients=3, rounds=1, seeds=1)


@pytest.mark.parametrize("engine", ["pool", "vector"])
def test_other_engines_name_the_line_too(engine: str) -> None:
    processes.end(processes.cores())
    with pytest.raises(RunError, match=r'wrongly_pooled\.py:\d+, "return new, owm": NameError'):
        run("wrongly_pooled:Typo", IMAGES, LABELS, clients=3, rounds=1, engine=engine)
    with pytest.raises(MethodError, match="returned the part 'haed'"):
        run("wrongly_pooled:Misnamed", IMAGES, LABELS, clients=3, rounds=1, engine=engine)


def test_the_cause_is_kept_for_python() -> None:
    with pytest.raises(RunError) as raised:
        run("wrongly:Typo", IMAGES, LABELS, clients=3, rounds=1)
    assert isinstance(raised.value.__cause__, NameError)


def test_a_model_that_cannot_be_exported_is_refused_for_devices_and_simulated_with_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = with_settings(Recipe(source="simulated"), ["model.name=wrong:Branching", "data.fraction=0.1"])
    setup = execution.prepare(recipe)
    with pytest.raises(
        MethodError,
        match=r'cannot be exported as ONNX.*wrong\.py:\d+, "if z\.sum\(\) > 0:".*no run was started',
    ):
        own_code.require_exported(setup)
    assert cli.main(["simulate", *SMALL, "--model", "wrong:Branching"]) == 0
    said = capsys.readouterr().err
    assert re.search(r'wrong\.py:\d+, "if z\.sum\(\) > 0:".*simulated, but not be sent to devices\n', said)
    assert said.startswith("model wrong:Branching: cannot be exported"), "and nothing of torch's"
    own_code.require_exported(execution.prepare(with_settings(recipe, ["model.name=wrong:Good"])))


def test_devices_are_said_to_need_the_package_of_what_is_not_built_in() -> None:
    settings = ["source=fleet", "model.name=wrong:Good", "method.name=wrongly:Base+ft"]
    setup = execution.prepare(with_settings(Recipe(), settings))
    assert own_code.not_built_in(setup) == "method wrongly:Base+ft, model wrong:Good"
    assert own_code.not_built_in(execution.prepare(with_settings(Recipe(), ["source=fleet"]))) == ""
