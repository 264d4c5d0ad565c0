"""Trees are matched by name, not by order; inputs are never changed."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from edge_fl.learn import tree
from edge_fl.learn.tree import Parts

names = st.text("abc.", min_size=1, max_size=3)
numbers = st.floats(-9, 9, width=32)
parts = st.dictionaries(names, st.dictionaries(names, numbers.map(torch.tensor), max_size=3), max_size=3)


def example() -> Parts:
    return {
        "extractor": {
            "w": torch.tensor([1.0, 2.0]),
            "buffer:mean": torch.tensor([0.5]),
            "buffer:n": torch.tensor(3),
        },
        "head": {"w": torch.tensor([[4.0]])},
    }


def test_parameters_are_the_floating_leaves_that_are_no_buffers() -> None:
    assert tree.parameters(example()).keys() == {("extractor", "w"), ("head", "w")}
    assert tree.has_buffers(example())
    assert not tree.has_buffers({"head": example()["head"]})


def test_map_follows_names_and_keeps_what_is_no_tensor() -> None:
    turned = {name: dict(reversed(params.items())) for name, params in reversed(example().items())}
    assert tree.same(tree.map(torch.sub, example(), turned), tree.map(torch.zeros_like, example()))
    assert tree.map(lambda t: t + 1, (torch.tensor(1), None, 5, {"x": torch.tensor(2)}))[1:3] == (None, 5)


def test_a_clone_shares_no_memory() -> None:
    given_ = example()
    copy = tree.clone(given_)
    copy["head"]["w"].add_(1)
    assert tree.same(given_, example())


def test_replaced_exchanges_leaves_by_path_and_shares_the_others() -> None:
    given_ = example()
    changed = tree.replaced(given_, {("head", "w"): torch.tensor(0.0)})
    assert changed["head"]["w"] == 0.0
    assert changed["extractor"]["w"] is given_["extractor"]["w"]
    assert tree.same(given_, example())


@given(parts, parts)
def test_in_a_merge_the_later_wins_tensor_by_tensor(one: Parts, other: Parts) -> None:
    merged = tree.merge(one, other)
    assert merged.keys() == one.keys() | other.keys()
    for name, params in merged.items():
        for key, tensor in params.items():
            assert tensor is (other.get(name, {}) if key in other.get(name, {}) else one[name])[key]


@given(parts, st.dictionaries(names, st.frozensets(names)))
def test_merge_undoes_a_split(whole: Parts, chosen: dict[str, frozenset[str]]) -> None:
    inside, outside = tree.split(whole, chosen)
    assert all(key in chosen[name] for name, params in inside.items() for key in params)
    assert not any(key in chosen.get(name, ()) for name, params in outside.items() for key in params)
    assert tree.same(tree.merge(inside, outside), whole)


@given(parts)
def test_unprefixed_undoes_prefixed_among_others(whole: Parts) -> None:
    assert tree.unprefixed("own_", {**tree.prefixed("own_", whole), "other": {}}) == whole


@given(parts)
def test_arrays_come_back_bit_for_bit_with_memory_of_their_own(whole: Parts) -> None:
    arrays = tree.to_arrays(whole)
    back = tree.from_arrays(arrays)
    assert tree.same(back, whole)
    for name, params in back.items():
        for key, tensor in params.items():
            tensor.add_(1)
            assert arrays[name][key] == whole[name][key]


def test_where_selects_a_tree_by_a_tensor() -> None:
    one, other = example(), tree.map(lambda t: t + 1, example())
    for flag, chosen in [(torch.tensor(1.0), one), (torch.tensor(0.0), other), (torch.tensor(True), one)]:
        assert tree.same(tree.where(flag, one, other), chosen)


def test_the_first_nan_is_named() -> None:
    broken = example()
    assert tree.first_not_finite(broken) is None
    broken["extractor"]["buffer:mean"] = torch.tensor([torch.inf])
    assert tree.first_not_finite(broken) == "extractor.buffer:mean"
    assert tree.first_not_finite({"a": {"w": torch.full((9,), 3e38)}}) is None, "only their sum overflows"
    assert tree.first_not_finite({"a": {"w": torch.tensor([torch.inf, 1, -torch.inf])}}) == "a.w"


def test_trees_are_the_same_only_with_equal_names_and_bits() -> None:
    assert tree.same(example(), example())
    assert not tree.same(example(), {"head": example()["head"]})
    nearly = example()
    nearly["head"]["w"] = torch.nextafter(nearly["head"]["w"], torch.tensor(9.0))
    assert not tree.same(example(), nearly)
