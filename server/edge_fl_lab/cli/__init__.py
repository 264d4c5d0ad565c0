"""The researcher's commands. Nothing heavy is imported before a command runs."""

from edge_fl.cli import App
from edge_fl_lab.cli import catalogue, compare, demo, runs, simulate


def register(app: App) -> None:
    """Add the demo, and the commands on methods, simulated federations, comparisons, datasets and finished runs."""
    app.root.add(demo.demo, "edge-fl demo", panel="Start")
    for command, example in (
        (simulate.simulate, "edge-fl simulate --method repper --dataset digits --rounds 10"),
        (compare.compare, "edge-fl compare --methods fedrep,fedcrc,repper --datasets digits --seeds 3"),
        (runs.report, "edge-fl report demo-20261120-101500"),
        (runs.plots, "edge-fl plots simulate-20261120-101500"),
        (runs.newtask, "edge-fl newtask simulate-20261120-101500 --dataset digits --clients 10"),
    ):
        app.root.add(command, example, panel="Research")
    methods = app.group("methods", "Federated methods: list, show, recommend.", "Research")
    methods.add(catalogue.list_methods, "edge-fl methods list", name="list")
    methods.add(catalogue.show_method, "edge-fl methods show fedcrc", name="show")
    example = "edge-fl methods recommend --clients 12 --samples 50"
    methods.add(catalogue.recommend_method, example, name="recommend")
    for name, help, listing in (
        ("models", "Networks: list them.", catalogue.list_models),
        ("heads", "Personal heads: list them.", catalogue.list_heads),
        ("datasets", "Datasets for research: list them.", catalogue.list_datasets),
    ):
        app.group(name, help, "Research").add(listing, f"edge-fl {name} list", name="list")
    data = app.group("data", "Datasets, as .npz files in a folder: download, convert.", "Research")
    data.add(catalogue.download, "edge-fl data download fashion-mnist")
    data.add(catalogue.convert, "edge-fl data convert pictures pets")
