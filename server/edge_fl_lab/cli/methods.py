"""`edge-fl methods list`, `edge-fl methods show` and `edge-fl methods recommend`."""

from typing import Annotated, Literal

from edge_fl.cli import App
from edge_fl.console.output import Format, show_json, show_table, show_text
from edge_fl.console.tables import Column
from edge_fl.options import DATA, TRAINING, FormatOption, argument, option


def register(app: App) -> None:
    """Add the group `methods`."""
    methods = app.group("methods", "Federated methods: list, show, recommend.", "Research")
    methods.add(list_methods, "edge-fl methods list", name="list")
    methods.add(show_method, "edge-fl methods show fedcrc", name="show")
    methods.add(recommend_method, "edge-fl methods recommend --clients 12 --samples 50", name="recommend")


def list_methods(format: FormatOption = Format.TABLE) -> None:
    """List every method: family, shared and personal parts, behaviour of head-only devices, paper."""
    from edge_fl_lab.catalogue import COLUMNS, rows

    columns = {key: Column(heading, prose=key != "name") for key, heading in COLUMNS.items()}
    columns["citation"] = Column(COLUMNS["citation"], prose=True, rank=1)
    show_table(rows(), columns, format)


def show_method(
    name: Annotated[str, argument("METHOD", "A method of 'edge-fl methods list'.")],
    model: Annotated[str, option("--model MODEL", "Model for which bytes are counted.", TRAINING)] = "cnn2",
    egress: Annotated[
        bool, option("--egress", "Print only what may leave a device, by tier, as JSON.")
    ] = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show one method: hyper-parameters with range and source, shared parts, bytes per round, deviations from the paper."""
    from edge_fl_lab import catalogue

    if egress:
        print(catalogue.egress_json(name))
    elif format is Format.JSON:
        show_json(catalogue.facts(name, model))
    else:
        show_text(catalogue.describe(name, model))


def recommend_method(
    clients: Annotated[int, option("--clients N", "Clients that train.", DATA, min=1)],
    samples: Annotated[int, option("--samples N", "Training images of each of them, on average.", min=1)],
    tier: Annotated[
        Literal["full", "head"], option("--tier TIER", "Devices whose accuracy counts.")
    ] = "full",
    format: FormatOption = Format.TABLE,
) -> None:
    """Recommend a method from a stored study of tuned methods, with the evidence; see docs/choosing-a-method.md."""
    from edge_fl_lab.recommend import choose, evidence, show

    found = choose.recommend(evidence.load(), tier, clients, samples)
    if format is Format.JSON:
        show_json(found)
    else:
        show_text(show.text(found))
