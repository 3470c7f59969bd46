from typing import Any

import pytest

from hf_sparse_attn import Quest, TokenSelect
from hf_sparse_attn.cli.variants import column_names, describe, make_methods


def test_each_method_comes_with_each_budget_and_dense_attention_with_none() -> None:
    methods = make_methods(("full", "quest", "tokenselect"), (64, 128))
    assert [(method.name, method.token_budget) for method in methods] == [
        ("quest", 64),
        ("quest", 128),
        ("tokenselect", 64),
        ("tokenselect", 128),
    ]
    assert column_names(methods) == ["quest 64", "quest 128", "tokenselect 64", "tokenselect 128"]


def test_a_method_that_reads_everything_comes_once_for_all_budgets() -> None:
    methods = make_methods(("ntk", "quest", "self_extend"), (64, 128), {"factor": [2.0, 4.0]})
    assert column_names(methods) == ["ntk factor=2.0", "ntk factor=4.0", "quest 64", "quest 128", "self_extend"]


def test_a_method_that_occurs_once_has_its_bare_name() -> None:
    methods = make_methods(("quest", "tokenselect"))
    assert methods == [Quest(), TokenSelect()]
    assert column_names(methods) == ["quest", "tokenselect"]
    assert make_methods(("full",)) == []


def test_a_parameter_goes_to_the_methods_that_have_it_or_to_the_one_that_it_names() -> None:
    methods = make_methods(("quest", "tokenselect"), (64,), {"chunk_size": 32, "quest.page_size": 32})
    assert methods == [Quest(token_budget=64, page_size=32), TokenSelect(token_budget=64, chunk_size=32)]
    quest, tokenselect = make_methods(("quest", "tokenselect"), (), {"token_budget": 64, "quest.token_budget": 128})
    assert (quest.token_budget, tokenselect.token_budget) == (128, 64)


def test_a_list_of_values_is_a_sweep_of_the_methods_that_have_the_parameter() -> None:
    methods = make_methods(("quest", "tokenselect"), (64, 128), {"page_size": [8, 16], "tokenselect.vote": "head"})
    assert methods == [
        *(Quest(token_budget=budget, page_size=size) for size in (8, 16) for budget in (64, 128)),
        *(TokenSelect(token_budget=budget, vote="head") for budget in (64, 128)),
    ]
    assert column_names(methods) == [
        *(f"quest {budget} page_size={size}" for size in (8, 16) for budget in (64, 128)),
        *("tokenselect 64", "tokenselect 128"),
    ]
    budgets = make_methods(("quest", "tokenselect"), (), {"quest.token_budget": (64, 128)})
    assert column_names(budgets) == ["quest 64", "quest 128", "tokenselect"]


def test_parameters_are_listed_once_with_all_budgets() -> None:
    quest, tokenselect = describe(make_methods(("quest", "tokenselect"), (64, 128), {"page_size": 8}))
    assert quest.startswith("quest: token_budget=64 or 128, ")
    assert quest.count("page_size=8") == 1
    assert "vote=soft" in tokenselect


@pytest.mark.parametrize(
    ("names", "budgets", "parameters", "message"),
    [
        (("quest", "qest"), (), {}, "unknown method 'qest' .*'quest'"),
        (("quest", "quest"), (), {}, "method 'quest' is given twice"),
        (("quest",), (64, 64), {}, "token budget 64 is given twice"),
        (("quest",), (64,), {"token_budget": 128}, "token_budget is given twice"),
        (("quest", "tokenselect"), (64,), {"quest.token_budget": 128}, "token_budget is given twice"),
        (("quest", "tokenselect"), (), {"size": 1}, "unknown parameter 'size': quest takes .*page_size"),
        (("quest",), (), {"tokenselect.k": 1}, "'tokenselect' is not among the methods quest"),
        (("quest",), (), {"quest.page_sise": 1}, "did you mean 'page_size'"),
        (("full", "quest"), (), {"full.page_size": 16}, "full has no parameter 'page_size'"),
        (("quest",), (8,), {}, "8"),
        (("quest",), (), {"page_size": []}, r"page_size=\[\] is not allowed: at least one value"),
        (("quest",), (), {"page_size": [8, 16, 8]}, r"page_size=\[8, 16, 8\]: 8 is given twice"),
    ],
)
def test_bad_input_names_what_is_wrong(
    names: tuple[str, ...], budgets: tuple[int, ...], parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_methods(names, budgets, parameters)
