"""The runs of a paper's table, as printed or on another model, with the methods that can run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from eval.config import DENSE, RunConfig, changed
from eval.engine import Variant, make_variants
from eval.errors import EvalError
from eval.studies import known_methods
from hf_sparse_attn.methods import make_method

BUDGETS = ("token_budget", "k")
"""Parameters that set a method's budget."""

Row = tuple[str, int | None, str]
"""A row of a table: method, token budget, and name of the variant."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Refusal:
    """A row that cannot run, or some of whose samples failed, and the reason."""

    method: str
    reason: str
    token_budget: int | None = None
    """None for every budget."""
    variant: str | None = None
    """None for every variant."""
    task: str | None = None
    """None for every task."""
    length: int | None = None
    """In tokens; None for every length."""

    def concerns(self, row: Row, task: str | None, length: int | None) -> bool:
        """Whether it holds for a row of a task and a length, None for a mean over several."""
        method, token_budget, variant = row
        return (
            self.method == method
            and self.token_budget in (None, token_budget)
            and self.variant in (None, variant)
            and (task is None or self.task in (None, task))
            and (length is None or self.length in (None, length))
        )


@dataclass(frozen=True)
class TableRun:
    """A run of a table."""

    printed: RunConfig
    """As in the table's file."""
    config: RunConfig
    """As it runs here; names existing methods only."""
    variants: tuple[Variant, ...]
    """Dense attention and every row that can be made."""
    refusals: tuple[Refusal, ...]
    """The other rows."""
    rows: Mapping[Row, Row]
    """The row that runs for each row as printed: itself, or one with another budget in its place."""
    lengths: Mapping[int, int]
    """The length that runs for each length as printed."""


def table_runs(printed: Sequence[RunConfig], given: Mapping[str, Any]) -> list[TableRun]:
    """Return the runs of a table with the command line's settings.

    A model of the table runs alone; any other takes the place of all of the table's, without their chat templates.

    Raises
    ------
    EvalError
        A task is not the table's, or a length or budget is not allowed.
    """
    runs = [run for run in printed if run.model == given.get("model")] or printed
    known = dict.fromkeys(task for run in runs for task in run.tasks)
    if all(run.tasks for run in runs) and (unknown := [task for task in given.get("tasks") or () if task not in known]):
        raise EvalError(f"tasks={unknown} is not allowed: one or more of {', '.join(known)}")
    return [_table_run(run, _adapted(run, given)) for run in runs]


def _table_run(printed: RunConfig, config: RunConfig) -> TableRun:
    groups, refusals = _groups(config)
    rows: dict[Row, Row] = {}
    for before, after in zip(_groups(printed)[0], groups, strict=True):
        named = stand_ins([row_of(variant) for variant in before], [row_of(variant) for variant in after])
        rows |= named
        for (method, budget, name), row in named.items():
            if sum(each[::2] == (method, name) for each in named) == 1 and budget is not None:
                rows.setdefault((method, None, name), row)
    variants = {row_of(variant): variant for group in groups for variant in group}
    known = known_methods()
    runnable = replace(
        config,
        method=tuple(name for name in config.method if name in known),
        variants=tuple(each for each in config.variants if each["method"] in known),
    )
    dense = Variant(make_method(DENSE), None)
    return TableRun(
        printed=printed,
        config=runnable,
        variants=(dense, *variants.values()),
        refusals=tuple(refusals),
        rows={row_of(dense): row_of(dense), **rows},
        lengths=stand_ins(printed.lengths, config.lengths),
    )


def row_of(variant: Variant) -> Row:
    """Return the row of a variant's records."""
    return variant.method.name, variant.token_budget, variant.name


def stand_ins(printed: Sequence[_T], own: Sequence[_T]) -> dict[_T, _T]:
    """Pair what a table has with the equal ones of what runs; if there are none, all of both in order."""
    return {each: each for each in printed if each in own} or dict(zip(printed, own, strict=False))


def _adapted(printed: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    """Return a run with the command line's settings."""
    changes = {name: value for name, value in given.items() if value not in (None, (), {})}
    if changes.get("model", printed.model) != printed.model:
        changes.setdefault("chat_template", None)  # the printed one belongs to the paper's model
    if tasks := changes.get("tasks"):
        changes["tasks"] = tuple(task for task in printed.tasks if task in tasks) if printed.tasks else tuple(tasks)
        if not changes["tasks"]:
            raise EvalError(f"tasks={list(tasks)} is not allowed: one or more of {', '.join(printed.tasks)}")
    if lengths := changes.get("lengths"):
        changes["lengths"] = tuple(lengths)
    if budgets := changes.pop("token_budget", ()):
        changes |= _with_budgets(printed, list(budgets))
    return changed(printed, changes)


def _with_budgets(run: RunConfig, budgets: list[int]) -> dict[str, Any]:
    """Return the settings in which every method with sparse decode steps has other budgets."""
    sparse = {name for name, method in known_methods().items() if "decode" in method.sparse_phases}
    kept = {key: value for key, value in run.parameters.items() if key.rpartition(".")[2] not in BUDGETS}
    variants = []
    for variant in run.variants:
        if variant["method"] in sparse:
            others = {key: value for key, value in variant.items() if key not in BUDGETS}
            variants.append({**others, "token_budget": budgets})
        else:
            variants.append(variant)
    named = {f"{name}.token_budget": budgets for name in run.method if name in sparse}
    return {"token_budget": (), "parameters": {**kept, **named}, "variants": tuple(variants)}


def _groups(config: RunConfig) -> tuple[list[list[Variant]], list[Refusal]]:
    """Return what each of a run's methods, and each of its variants, gives, and what cannot be made."""
    known = known_methods()
    groups, refusals = [], []
    for method, parts in _parts(config):
        group: list[Variant] = []
        if method not in known:
            refusals.append(Refusal(method, "this method is not here yet"))
        else:
            for budget, part in parts:
                try:
                    group += make_variants(part)[1:]
                except EvalError as error:
                    refusals.append(Refusal(method, str(error), budget))
        groups.append(group)
    return groups, refusals


def _parts(config: RunConfig) -> list[tuple[str, list[tuple[int | None, RunConfig]]]]:
    """Split a run by method and budget, so that what one of them lacks does not stop the others."""
    parts: list[tuple[str, list[tuple[int | None, RunConfig]]]] = []
    for name in config.method:
        if name != DENSE:
            own = _parameters_of(name, config.parameters)
            budgets = _listed(own.pop("token_budget", config.token_budget or None))
            variant = {"method": name, **own}
            parts.append((name, [_part(config, variant, budget, sweeps=True) for budget in budgets]))
    for given in config.variants:
        budgets = _listed(given.get("token_budget", None))
        rest = {key: value for key, value in given.items() if key != "token_budget"}
        parts.append((given["method"], [_part(config, rest, budget, sweeps=False) for budget in budgets]))
    return parts


def _part(
    config: RunConfig, variant: Mapping[str, Any], budget: int | None, *, sweeps: bool
) -> tuple[int | None, RunConfig]:
    """Return a run of one method with one budget; ``sweeps`` names variants as ``RunConfig.method`` does."""
    name, budgets = variant["method"], () if budget is None else (budget,)
    bare = replace(config, method=(DENSE,), token_budget=(), parameters={}, variants=())
    if sweeps:
        parameters = {key: value for key, value in variant.items() if key != "method"}
        return budget, changed(bare, {"method": (name,), "token_budget": budgets, "parameters": parameters})
    return budget, changed(bare, {"variants": ({**variant, **({} if budget is None else {"token_budget": budget})},)})


def _parameters_of(method: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method's own parameters, without its name before them."""
    known = known_methods()
    has = {field.name for field in fields(known[method])} if method in known else set()
    shared = {key: value for key, value in parameters.items() if key in has}
    prefix = f"{method}."
    return shared | {key.removeprefix(prefix): value for key, value in parameters.items() if key.startswith(prefix)}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
