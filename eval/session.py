"""A session: a valid run with its model loaded and its folder claimed, which measures and stores records."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.benchmarks import Item, Sample
from eval.chat_templates import read_chat_template
from eval.config import RunConfig
from eval.engine import Engine, Variant
from eval.errors import EvalError
from eval.expected import expected_seconds, total_work
from eval.processes import Processes
from eval.protocols import load_protocol
from eval.records import make_record
from eval.run_check import ModelSource, OnRefusal, check_patchable, find_benchmark, prepare, usable
from eval.store import RecordKey, Store, record_key, write_json


@dataclass(frozen=True)
class Session:
    """A valid run with its model loaded and its folder claimed."""

    config: RunConfig
    items: Sequence[Item]
    variants: Sequence[Variant]
    """Those of the run that can be used with the model."""
    engine: Engine
    store: Store
    processes: Processes
    provenance: dict[str, Any]
    """What every record says about machine, versions, seed and protocol."""

    def measure(
        self,
        wanted: Sequence[tuple[Item, Sequence[Variant]]],
        on_record: Callable[[int, int, dict[str, Any] | None], None] = lambda done, total, record: None,
    ) -> None:
        """Append this process's share of the wanted records; existing ones are not measured again."""
        variants = {id(item): each for item, each in wanted}
        groups = by_material([item for item, _ in wanted])
        share = [
            [(item, variants[id(item)]) for item in group]
            for group in groups[self.processes.rank :: self.processes.world_size]
        ]
        for record in _missing_records(self.engine, self.config, self.store, share, on_record):
            self.store.append(record | self.provenance)

    def expected_seconds(self, wanted: Sequence[tuple[Item, Sequence[Variant]]]) -> float | None:
        """Estimate the seconds that the wanted records will take which do not exist yet; None for a short run."""
        done = {record_key(record) for record in self.store.records() if record["error"] is None}
        missing = [(item, [each for each in variants if key_of(item, each) not in done]) for item, variants in wanted]
        work = total_work(missing, self.config.question == "decode")
        seconds = expected_seconds(self.engine.model, work)
        return None if seconds is None else seconds / self.processes.world_size


@contextmanager
def open_session(
    config: RunConfig,
    variants: Sequence[Variant],
    out: Path,
    source: ModelSource,
    processes: Processes,
    *,
    identity: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    on_refusal: OnRefusal | None = None,
) -> Iterator[Session]:
    """Check a run, load its model, and claim its folder while the context lasts.

    Parameters
    ----------
    config, out, source, processes
        As for :func:`run`.
    variants : sequence of Variant
        The variants to check the benchmark, the model and its positions against.
    identity : callable
        Returns the settings that the folder belongs to, of all settings.
    on_refusal : callable, optional
        Called with each variant that cannot be used, and the reason; the others run. None raises the first reason.

    Raises
    ------
    EvalError
        The run is invalid. No record is written.
    """
    benchmark = find_benchmark(config)
    protocol = benchmark.protocol
    protocol_dir = Path(config.protocol_dir) if config.protocol_dir else None
    sha256 = load_protocol(protocol, protocol_dir).sha256 if protocol else None

    store = Store(out, processes.rank, processes.world_size)
    settings = {**config.as_json(), "protocol_sha256": sha256}
    template = None
    if config.chat_template is not None:
        template = read_chat_template(config.chat_template, protocol_dir)
        settings["chat_template_sha256"] = hashlib.sha256(template.encode()).hexdigest()
    settings = identity(settings)
    store.check(settings)  # reads only: the folder is claimed once the run is known to be valid
    store.records()  # reports a damaged file before the work, not after
    prepared = prepare(config, benchmark, template, variants, source, on_refusal)
    model = source.load(config)
    patchable = usable(prepared.variants, lambda variant: check_patchable(model, variant), on_refusal)
    with _claimed(store, settings, processes):
        engine = Engine(model, prepared.tokenizer, config)
        provenance = {**engine.machine, "seed": config.seed, "protocol": protocol, "protocol_sha256": sha256}
        yield Session(config, prepared.items, patchable, engine, store, processes, provenance)


def _missing_records(
    engine: Engine,
    config: RunConfig,
    store: Store,
    groups: Sequence[Sequence[tuple[Item, Sequence[Variant]]]],
    on_record: Callable[[int, int, dict[str, Any] | None], None],
) -> Iterator[dict[str, Any]]:
    """Yield the records that are missing or have an error, one after another."""
    done = {record_key(record) for record in store.records() if record["error"] is None}
    todo = [
        [(item, [variant for variant in variants if key_of(item, variant) not in done]) for item, variants in group]
        for group in groups
    ]
    total = sum(len(variants) for group in groups for _, variants in group)
    count = total - sum(len(missing) for group in todo for _, missing in group)
    on_record(count, total, None)
    for group in todo:
        for item, variant, measured in _measure(engine, [(item, missing) for item, missing in group if missing]):
            record = make_record(config, item, variant, measured)
            yield record
            count += 1
            on_record(count, total, record)


def by_material(items: Sequence[Item]) -> list[list[Item]]:
    """Group consecutive items that share a material, which one process runs; other items stand alone."""
    groups: list[list[Item]] = []
    for item in items:
        last = groups[-1][-1] if groups else None
        if last is not None and item.material is not None and _material(item) == _material(last):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _material(item: Item) -> tuple[str, int | None, str | None]:
    return item.task, item.length, item.material


@contextmanager
def _claimed(store: Store, config: dict[str, Any], processes: Processes) -> Iterator[None]:
    error = None
    if processes.is_main:
        try:
            store.claim(config)
        except EvalError as raised:
            error = raised
    processes.agree(error)
    try:
        yield
    finally:
        if processes.is_main:
            store.release()


def key_of(item: Item, variant: Variant) -> RecordKey:
    """Return the key of an item's record."""
    return item.task, item.length, item.sample_id, variant.method.name, variant.token_budget, variant.name


def _measure(
    engine: Engine, todo: Sequence[tuple[Item, Sequence[Variant]]]
) -> Iterator[tuple[Item, Variant, dict[str, Any]]]:
    """Build the samples of items that share a material, and run them."""
    built: list[tuple[Item, Sample]] = []
    jobs = []
    for item, missing in todo:
        try:
            sample = item.build()
        except Exception as error:  # stored in the sample's records: one bad sample must not end a long run
            for variant in missing:
                yield item, variant, {"error": f"{type(error).__name__}: {error}"}
            continue
        built.append((item, sample))
        jobs.append((sample, missing))
    for number, variant, measured in engine.run(jobs):
        item, sample = built[number]
        yield item, variant, {"sample": sample, **measured}


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result that was made from records.

    Raises
    ------
    EvalError
        The file cannot be written.
    """
    try:
        write_json(path, result)
    except OSError as error:
        raise EvalError(f"{path} cannot be written: {error}; the records are kept") from error
