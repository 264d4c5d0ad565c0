"""A comparison runs only missing cells, names every number, survives failed cells, and is compared with the paper."""

import csv
import json
from pathlib import Path

import msgspec
import pytest

from edge_fl import cli
from edge_fl.console.progress import Count
from edge_fl.console.tables import Table
from edge_fl.errors import ConfigError, InputError, MethodError
from edge_fl.metrics import LOCAL_ONLY, PERSONAL_AFTER, PERSONAL_BEFORE, PERSONAL_LOCAL, Summary
from edge_fl_lab.compare import cell_runs, comparison, paper, summary, tables
from edge_fl_lab.compare.cell_runs import CellResult, Point
from edge_fl_lab.compare.comparison import CellProgress, about
from edge_fl_lab.compare.grid import ALWAYS, Cell, cells, parse_method, trainings
from edge_fl_lab.recipe_changes import with_method
from edge_fl_server import recipes
from edge_fl_server.recipes.recipe import Recipe, with_settings

TINY = with_settings(
    Recipe(name="tiny"),
    ["data.clients=3", "data.fraction=0.2", "rounds=1", "model.options={feature_dim=8, width=4}"],
)


def summed(mean: float, std: float = 0.0) -> Summary:
    return Summary(mean, mean, std, mean - std, 4)


def result(cell: Cell, after: float, **fields: object) -> CellResult:
    return CellResult(cell.key, cell.label, cell.recipe, last={PERSONAL_AFTER: summed(after)}, **fields)  # type: ignore[arg-type]


def written(folder: Path) -> dict[str, float]:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "cells").glob("*.json")}


def test_every_comparison_holds_local_fedavg_and_fine_tuning() -> None:
    assert [cell.label for cell in cells(TINY, ["fedrep"])] == [*ALWAYS, "fedrep"]
    assert [cell.label for cell in cells(TINY, ["fedrep", "local", "fedrep"])] == [*ALWAYS, "fedrep"]


def test_the_grid_is_methods_by_datasets_by_partitions_by_seeds() -> None:
    grid = cells(TINY, ["fedrep"], ["digits", "mnist"], ["dirichlet:0.1", "pathological:2", "iid"], 2)
    assert len(grid) == 4 * 2 * 3 * 2
    assert len({cell.key for cell in grid}) == len(grid)
    assert {cell.block[1] for cell in grid} == {"dirichlet 0.1", "pathological 2", "iid"}
    assert {cell.recipe.seed for cell in grid} == {0, 1}


def test_a_cells_key_depends_only_on_what_determines_its_numbers() -> None:
    (cell,) = [c for c in cells(TINY, ["fedrep"]) if c.label == "fedrep"]

    def key(*settings: str) -> str:
        return Cell("other", with_settings(cell.recipe, list(settings))).key

    assert key('name="x"', 'data.data_dir="/x"', "compare.seeds=9", "broker.port=1") == cell.key
    for decisive in ("seed=1", "rounds=2", "data.beta=0.2", "method.options.head_epochs=1", 'device="cpu"'):
        assert key(decisive) != cell.key


def test_options_of_a_method_are_checked_before_anything_runs() -> None:
    assert parse_method("fedcrc:tau=0.5:kl=reverse") == ("fedcrc", {"tau": 0.5, "kl": "reverse"})
    assert parse_method("fedavg+ft:ft_epochs=2") == ("fedavg+ft", {"ft_epochs": 2})
    for wrong in ("nope", "fedcrc:tau=2", "fedcrc:nope=1"):
        with pytest.raises(MethodError):
            parse_method(wrong)
    with pytest.raises(InputError):
        parse_method("fedcrc:tau")


def test_a_single_method_may_set_its_own_compression_and_privacy() -> None:
    label = "fedrep:head_epochs=2:compression.kind=int8:privacy.clip=0.5"
    (cell,) = [c for c in cells(TINY, [label]) if c.label == label]
    assert cell.recipe.method.options == {"head_epochs": 2}
    assert (cell.recipe.compression.kind, cell.recipe.privacy.clip) == ("int8", 0.5)
    assert all(c.recipe.compression.kind == "none" for c in cells(TINY, [label]) if c.label != label)
    with pytest.raises(ConfigError, match="compression"):
        cells(TINY, ["fedrep:compression.kind=zip"])


@pytest.mark.parametrize("wrong", ["dirichle:1", "iid:3", "dirichlet:x", "pathological:0"])
def test_an_invalid_partition_is_rejected(wrong: str) -> None:
    with pytest.raises(InputError):
        cells(TINY, [], partitions=[wrong])


def test_a_second_call_runs_only_what_is_missing(tmp_path: Path) -> None:
    first = comparison.run(cells(TINY, ["fedrep"]), tmp_path)
    before = written(tmp_path)
    again = comparison.run(cells(TINY, ["fedrep"]), tmp_path)
    assert again == first and written(tmp_path) == before
    more = comparison.run(cells(TINY, ["fedrep", "repper"]), tmp_path)
    assert len(more) == len(first) + 1
    assert {name: at for name, at in written(tmp_path).items() if name in before} == before


def test_a_cell_that_was_cut_short_is_run_again(tmp_path: Path) -> None:
    (cell, *_) = cells(TINY, [])
    (found,) = cell_runs.run([cell], tmp_path)
    (path,) = tmp_path.glob(f"cells/{cell.key}-*.json")
    path.rename(tmp_path / "cells" / f".{cell.key}.json.part")  # what a power cut leaves
    assert cell_runs.read(cell, tmp_path) is None
    assert cell_runs.run([cell], tmp_path)[0].last == found.last
    path.write_text("{")
    with pytest.raises(InputError, match="remove it to run that cell again"):
        cell_runs.read(cell, tmp_path)


def test_a_failed_cell_is_shown_and_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "wild.toml"
    recipe.write_text(
        'rounds = 1\n[data]\nclients = 3\nfraction = 0.2\n[compare]\nmethods = ["repper"]\n'
        '[method.optimiser]\nlr = 1e30\n[methods.repper]\noptimiser = { name = "adam", lr = 0.001 }\n'
    )
    command = ["compare", "--recipe", str(recipe), "--seeds", "1", "--out", str(tmp_path / "out")]
    assert cli.main(command) == 1
    shown = capsys.readouterr()
    assert "3 of 4 cells failed" in shown.err
    assert "fedavg FAILED with seed 0" in shown.out and "NaN or Infinity" in shown.out
    first_words = [line.split()[:2] for line in shown.out.splitlines()]
    assert ["local", "failed"] in first_words and ["repper", "failed"] not in first_words
    before = written(tmp_path / "out")
    assert cli.main(command) == 1 and written(tmp_path / "out") == before
    assert cli.main([*command, "--retry"]) == 1 and written(tmp_path / "out") != before


def test_child_processes_give_the_same_numbers_and_a_dead_one_fails_only_its_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deadly.py").write_text(
        "import os\ndef build(input, **options):\n    os.kill(os.getpid(), 11)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    good, deadly = (
        Cell(name, with_settings(TINY, [f"model.name={name}:build"])) for name in ("good", "deadly")
    )
    (tmp_path / "good.py").write_text("from edge_fl.models.cnn import tiny as build\n")
    found: dict[str, CellResult] = {}
    counts: list[Count] = []
    comparison.run_all(
        [deadly, good], tmp_path / "children", 2, "", lambda m: found.update({m.label: m}), counts.append
    )
    assert found["deadly"].failure == comparison.DIED.format("was ended by SIGSEGV (segmentation fault)")
    assert cell_runs.read(deadly, tmp_path / "children") is None  # it may do better next time
    rounds = [(count.done, count.of) for count in counts if count.stage == str(good)]
    assert rounds[-1] == (1, 1) and (TINY.rounds, TINY.rounds) in rounds and (0, TINY.rounds) in rounds
    assert counts.count(Count(str(deadly), 1, 1)) == 1
    (here,) = cell_runs.run([good], tmp_path / "here")
    assert (here.last, here.clients) == (found["good"].last, found["good"].clients) and here.last


def test_fine_tuning_shares_the_rounds_of_the_method_that_it_tunes(tmp_path: Path) -> None:
    base = with_settings(TINY, ["rounds=2", "evaluate_every=1"])
    grid = cells(
        base, ["fedavg+ft:ft_epochs=1:ft_steps=1", "fedprox", "fedprox+ft:ft_scope=full"], without=["local"]
    )
    groups = [[cell.label for cell in group] for group in trainings(grid)]
    assert groups == [
        ["fedavg", "fedavg+ft", "fedavg+ft:ft_epochs=1:ft_steps=1"],
        ["fedprox", "fedprox+ft:ft_scope=full"],
    ]
    counts: list[Count] = []
    together: dict[str, CellResult] = {}
    comparison.run_all(grid, tmp_path, 1, "", lambda one: together.update({one.label: one}), counts.append)
    assert [one.failure for one in together.values()] == [""] * 5
    assert counts.count(Count("rounds", 2, 2)) == 2
    for cell in grid:
        (alone,) = cell_runs.run([cell], tmp_path / "alone")
        assert (alone.last, alone.clients, alone.participants) == (
            together[cell.label].last,
            together[cell.label].clients,
            together[cell.label].participants,
        )
        means = [
            [(point.means, point.weighted) for point in each.curve] for each in (alone, together[cell.label])
        ]
        assert means[0] == means[1]
    assert len({one.last[PERSONAL_AFTER].mean for one in together.values()}) > 2


def test_every_number_is_there_by_its_name(tmp_path: Path) -> None:
    grid = cells(TINY, ["fedrep"])
    rows = {row.method: row for row in summary.rows(grid, comparison.run(grid, tmp_path), target=0.0)}
    numbers = rows["fedavg"].numbers
    for metric in ("global.test_acc", PERSONAL_BEFORE, PERSONAL_AFTER):
        for statistic in ("", ".weighted_mean", ".std", ".bottom_decile", ".participants"):
            assert 0 <= numbers[metric + statistic].mean <= 1
    assert {f"{PERSONAL_BEFORE}.best_by_validation", LOCAL_ONLY, "seconds", "best_round"} <= numbers.keys()
    assert numbers[LOCAL_ONLY] == rows["local"].numbers[PERSONAL_AFTER]
    assert numbers["bytes_up_per_round"] == numbers["bytes_down_per_round"]
    both = numbers["bytes_up_per_round"].mean + numbers["bytes_down_per_round"].mean
    assert numbers["bytes_until_target"].mean == both
    assert rows["local"].numbers["bytes_up_per_round"].mean == 0
    assert "global.test_acc" not in rows["fedrep"].numbers


def test_numbers_are_means_and_stds_over_seeds_with_the_same_clients_under_local() -> None:
    grid = cells(TINY, ["fedrep"], seeds=2)
    after = {("local", 0): 0.5, ("local", 1): 0.7, ("fedrep", 0): 0.6, ("fedrep", 1): 0.8}
    known = {c.key: result(c, after[c.label, c.recipe.seed]) for c in grid if c.label in ("local", "fedrep")}
    rows = {row.method: row for row in summary.rows(grid, known)}
    assert rows["fedrep"].numbers[PERSONAL_AFTER].mean == pytest.approx(0.7)
    assert rows["fedrep"].numbers[PERSONAL_AFTER].std == pytest.approx(0.1)
    assert rows["fedrep"].numbers[LOCAL_ONLY].mean == pytest.approx(0.6)
    assert list(rows["fedrep"].keys) == [0, 1]


def test_bytes_until_a_target_count_every_round_before_it() -> None:
    (cell, *_) = cells(TINY, [])
    curve = [Point(n, 1.0, 10 * n, n, 2, {PERSONAL_BEFORE: accuracy}) for n, accuracy in ((1, 0.2), (2, 0.6), (3, 0.9))]  # fmt: skip

    def until(target: float, after: float = 0.9) -> tuple[float | None, float | None]:
        found = summary.numbers(result(cell, after, curve=curve), target)
        return found.get("rounds_until_target"), found.get("bytes_until_target")

    assert until(0.6) == (2, 11 + 22)
    assert until(0.2) == (1, 11)
    assert until(0.95) == (None, None)
    assert until(0.95, after=0.97) == (3, 66)  # reached by the final personalisation only: all rounds count
    assert summary.numbers(result(cell, 0.9, curve=curve), 0.6)["bytes_until_target.per_client"] == 33 / 2


def test_failed_seeds_leave_the_mean_of_the_others_with_their_number() -> None:
    grid = [cell for cell in cells(TINY, [], seeds=3) if cell.label == "local"]
    known = {grid[0].key: result(grid[0], 0.5), grid[1].key: result(grid[1], 0.7)}
    known[grid[2].key] = CellResult(grid[2].key, "local", grid[2].recipe, failure="it broke")
    rows = summary.rows(grid, known)
    (table,) = tables.tables(rows, grid)
    assert table.rows[0][table.headings.index("after")] == "60.00±10.00 (2)"
    assert "local FAILED with seed 2: it broke" in table.notes


def test_tables_are_saved_as_text_csv_markdown_latex_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "compare --methods fedrep --datasets digits --partitions dirichlet:0.5,iid --clients 3 --rounds 1 --seeds 1"
    assert (
        cli.main([*command.split(), "--set", "data.fraction=0.2", "--target", "0.5", "--out", str(tmp_path)])
        == 0
    )
    tables, _, verdicts = capsys.readouterr().out.rpartition("\n\n")
    assert tables.strip() == (tmp_path / "table.txt").read_text().strip()
    assert [line.partition(":")[0] for line in verdicts.splitlines()] == [
        "digits, dirichlet 0.5",
        "digits, iid",
    ]
    assert verdicts.count("of the test samples (mean over 1 seed, 3 pairs of client and seed)") == 2
    records = list(csv.DictReader((tmp_path / "table.csv").read_text().splitlines()))
    assert [(r["method"], r["partition"]) for r in records][3:5] == [
        ("fedrep", "dirichlet 0.5"),
        ("local", "iid"),
    ]
    assert 0 <= float(records[0][PERSONAL_AFTER]) <= 1
    tree = json.loads((tmp_path / "table.json").read_text())
    assert len(tree["rows"]) == 8 and tree["cells"][0]["recipe"]["data"]["clients"] == 3
    assert "| fedavg+ft |" in (tmp_path / "table.md").read_text()
    assert r"\toprule" in (tmp_path / "table.tex").read_text()


def test_special_signs_survive_markdown_and_latex() -> None:
    table = Table(["method", "a|b"], [["x_y", "1±2"]], "50 % of_all", ["- c & d:"])
    markdown, latex = comparison.text([table], "md"), comparison.text([table], "tex")
    assert r"| x_y | 1±2 |" in markdown and r"a\|b" in markdown
    assert r"x\_y & 1$\pm$2 \\" in latex
    assert latex.startswith("% - c & d:\n") and r"\caption{50 \% of\_all.}" in latex


def test_figures_are_compared_with_the_papers_and_changed_settings_are_listed() -> None:
    base = with_settings(recipes.find("fedcrc-cifar10-dir01"), ["rounds=10"])
    grid = cells(base, ["fedper", "fedrep"])
    after = {"fedavg": 0.5, "fedper": 0.6, "fedrep": 0.55}
    known = {c.key: result(c, after[c.label]) for c in grid if c.label in ("fedper", "fedrep")}
    (fedavg,) = [c for c in grid if c.label == "fedavg"]
    known[fedavg.key] = msgspec.structs.replace(
        result(fedavg, 0.5), last={"global.test_acc": summed(0.5), PERSONAL_AFTER: summed(0.9)}
    )
    table = paper.against("fedcrc-cifar10-dir01", grid, known)
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["fedavg (global)"][:4] == ["50.00", "4", "56.69", "-6.69"]
    assert rows["fedper"][:6] == ["60.00", "4", "12.57?", "+47.43", "1", "3"]
    assert rows["fedrep"][:6] == ["55.00", "4", "85.57", "-30.57", "2", "1"]
    notes = " ".join(table.notes)
    assert "rounds: 100 -> 10" in notes and "method." not in notes
    assert "2 of 3 pairs of methods are ordered differently in the paper" in notes
    assert "In the paper only: fedprox (global)" in notes


def test_a_paper_s_domain_is_compared_with_the_client_that_has_it() -> None:
    (cell,) = [c for c in cells(recipes.find("dualfed-pacs"), ["fedper"]) if c.label == "fedper"]
    clients = {"c000": {PERSONAL_AFTER: 0.9}, "c002": {PERSONAL_AFTER: 0.97}}
    known = msgspec.structs.replace(
        result(cell, 0.94, clients=clients),
        highest={"c000": {PERSONAL_BEFORE: 0.8}, "c002": {PERSONAL_BEFORE: 0.98}},
    )
    table = paper.against("dualfed-pacs", [cell], {cell.key: known})
    rows = {row[0]: [row[1], *row[3:5]] for row in table.rows}
    assert rows["fedper on c002"] == [
        "98.00",
        "98.20±0.42",
        "-0.20",
    ]  # photo; the paper prints each client's best round
    assert rows["fedper on c000"] == ["90.00", "89.54±1.16", "+0.46"]  # art painting
    assert rows["fedper"] == ["94.00", "92.58±0.57", "+1.42"]  # the mean of these two
    assert any("in each client's best round by test accuracy" in note for note in table.notes)


def _with_curve(cell: Cell, rounds: list[tuple[float, float]]) -> CellResult:
    """A result whose clients have unequal test sets; (plain mean, mean weighted by samples) by round, the last one also at the end."""
    points = [
        Point(number, 1.0, 0, 0, 2, means={PERSONAL_BEFORE: plain}, weighted={PERSONAL_BEFORE: weighted})
        for number, (plain, weighted) in enumerate(rounds, 1)
    ]
    plain, weighted = rounds[-1]
    last = {
        name: Summary(plain, weighted, std=0.07, bottom_decile=plain, clients=2)
        for name in (PERSONAL_BEFORE, PERSONAL_AFTER)
    }
    return msgspec.structs.replace(result(cell, plain), curve=points, last=last)


def test_each_paper_s_mean_and_round_are_those_of_our_number() -> None:
    rounds = [(0.6, 0.95), (0.7, 0.9)]
    found = {}
    for recipe in ("fedcrc-cifar10-dir01", "fedcrl-cifar10-dir01", "fedrir-fmnist-dir01"):
        (cell,) = [c for c in cells(recipes.find(recipe), ["fedrep"]) if c.label == "fedrep"]
        table = paper.against(recipe, [cell], {cell.key: _with_curve(cell, rounds)})
        found[recipe] = ({row[0]: row[1] for row in table.rows}["fedrep"], table.notes[0])
    assert (
        found["fedcrc-cifar10-dir01"][0] == "70.00"
        and "each alike, after the last round" in found["fedcrc-cifar10-dir01"][1]
    )
    assert (
        found["fedcrl-cifar10-dir01"][0] == "90.00±7.00"
    )  # weighted by samples, ± over clients as in the paper
    assert (
        found["fedrir-fmnist-dir01"][0] == "95.00" and "official server.py" in found["fedrir-fmnist-dir01"][1]
    )


def test_evaluations_that_the_paper_does_not_print_have_rows_of_their_own() -> None:
    (cell,) = [c for c in cells(recipes.find("fedcrc-cifar10-dir01"), ["fedcrc"]) if c.label == "fedcrc"]
    assert (
        cell.recipe.method.options["refresh_personal"] is False
    )  # the paper's personal head is not fitted again
    shares = {"global.test_acc": 0.6, PERSONAL_BEFORE: 0.7, PERSONAL_LOCAL: 0.8, PERSONAL_AFTER: 0.7}
    known = msgspec.structs.replace(result(cell, 0.7), last={name: summed(v) for name, v in shares.items()})
    table = paper.against("fedcrc-cifar10-dir01", [cell], {cell.key: known})
    rows = {row[0]: [row[1], *row[3:5]] for row in table.rows}
    assert rows["fedcrc (global)"] == ["60.00", "64.61", "-4.61"]
    assert rows["fedcrc"] == ["70.00", "79.40", "-9.40"]
    assert rows["fedcrc (post-local)"] == ["80.00", "-", "-"]
    assert "fedcrc (before)" not in rows  # equal to the one after: nothing is fitted at the end


def test_a_recipe_without_a_paper_table_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", "--methods", "fedrep", "--against-paper", "--out", str(tmp_path)]
    assert cli.main(command) == 4 and "needs --recipe" in capsys.readouterr().err
    assert cli.main([*command, "--recipe", "demo"]) == 4 and "no paper's table" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_missing_data_is_reported_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", "--recipe", "fedrir-domainnet", "--methods", "local", "--data-dir", str(tmp_path)]
    assert cli.main([*command, "--out", str(tmp_path / "o")]) == 4
    assert "domainnet-clipart.npz" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_remaining_time_is_estimated_from_each_methods_own_duration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    grid = [cell for cell in cells(TINY, ["fedrep"], seeds=2) if cell.label in ("local", "fedrep")]
    with CellProgress(grid, kept=3, jobs=1) as progress:
        progress.done(result(grid[0], 0.5, seconds=10.0))
        assert progress.seconds_left() == 30.0  # three more, as far as one can know
        progress.done(result(grid[1], 0.5, seconds=100.0))
        assert progress.seconds_left() == 110.0  # one of each
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "4 cells to run, 3 already done"
    said = "personal.test_acc.after 50.0 % in 100.0 s; about 2 min left"
    assert lines[2] == f"[2/4] fedrep, digits, dirichlet 0.3, seed 0: {said}"
    assert (about(90), about(5400), about(36000)) == ("about 90 s", "about 90 min", "about 10.0 h")


def test_a_block_is_described_by_what_all_its_methods_share() -> None:
    said = tables.conditions(recipes.find("fedrir-fmnist-rho05"))
    assert said == (
        "fashion-mnist, dirichlet 0.1: 20 clients, 50% to 100% of them in a round, cnn2-bn, 1,000 rounds of 1 epoch, "
        "batches of 100, Adam 0.0005"
    )
    assert recipes.partition_label(recipes.find("dualfed-pacs").data) == "domain"
    table = recipes.find("fedcrc-cifar10-dir01")
    grid = [Cell(name, with_method(table, name)) for name in ("fedavg", "fedrep")]
    (drawn,) = tables.tables([], grid)
    assert "fedrep has 1 epoch, head_epochs = 4." in drawn.notes
