"""A session: a valid run with its model loaded and its folder claimed, which measures and stores records."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.benchmarks import Item, Sample
from eval.chat_templates import read_chat_template
from eval.config import RunConfig
from eval.data_files import TaskFiles
from eval.engine import Engine, Variant
from eval.errors import EvalError
from eval.expected import Examples, expected_seconds, total_work
from eval.processes import Processes
from eval.protocols import load_protocol
from eval.records import make_record
from eval.run_check import ModelSource, OnRefusal, check_patchable, find_benchmark, prepare, usable
from eval.store import RecordKey, Store, record_key, write_json

UNITS_PER_PROCESS = 8
"""Units of work that several processes have at least, if possible, so that they end at about the same time."""
_TOKENS_PER_STEP = 50
"""Tokens in a long pass that take as long as one token that is fed alone, roughly."""

Unit = list[tuple[Item, list[Variant]]]
"""Items that share a material, which one process runs, and the variants of each."""


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
    """Fields of every record about machine, versions, seed and protocol."""
    examples: Examples = field(default_factory=Examples, repr=False)

    def measure(
        self,
        wanted: Sequence[tuple[Item, Sequence[Variant]]],
        on_record: Callable[[int, int, dict[str, Any] | None], None] = lambda done, total, record: None,
    ) -> float:
        """Append the wanted records that do not exist, in turns with the other processes, and wait for them.

        Returns this process's seconds without that wait.

        ``on_record`` is called with the number of records that are finished or in hand, the number of wanted ones, and
        this process's newest one.
        """
        started = time.perf_counter()
        units = self._units(wanted)
        done = self._done()
        todo = [
            [(item, missing) for item, variants in unit if (missing := _without(done, item, variants))]
            for unit in units
        ]
        counts = [sum(len(missing) for _, missing in unit) for unit in todo]
        total = sum(len(variants) for _, variants in wanted)
        finished = existing = total - sum(counts)
        on_record(existing, total, None)
        for number in self.processes.hand_out(len(units)):
            finished = existing + sum(counts[:number])
            for item, variant, measured in _measure(self.engine, todo[number]):
                record = make_record(self.config, item, variant, measured)
                self.store.append(record | self.provenance)
                finished += 1
                on_record(finished, total, record)
        seconds = time.perf_counter() - started
        self.processes.wait()
        if finished < total:
            on_record(total, total, None)
        return seconds

    def completed(self, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the records; those older than the field ``truncated`` say now whether their prompts were cut.

        Their samples are built again for that. They are the records' if all prompts and questions of a task and length
        have as many tokens; else the records stay as they are.
        """
        older = {record_key(record): record for record in records if _is_older(record)}
        of_samples = {key[:3] for key in older}
        samples = {
            key: _built(item) for item in self.items if (key := (item.task, item.length, item.sample_id)) in of_samples
        }
        changed = {key[:2] for key, record in older.items() if not _is_of(samples.get(key[:3]), record)}
        found = {
            key: {"truncated": sample.truncated}
            for key in older
            if (sample := samples.get(key[:3])) is not None and key[:2] not in changed
        }
        return [record | found.get(record_key(record), {}) for record in records]

    def _units(self, wanted: Sequence[tuple[Item, Sequence[Variant]]]) -> list[Unit]:
        """Divide records over units of work; for several processes into more of them, with the longest first.

        A material's variants share its prefill, so they are parted only if there are few materials.
        """
        variants = {id(item): list(each) for item, each in wanted}
        groups = by_material([item for item, _ in wanted])
        whole: list[Unit] = [[(item, variants[id(item)]) for item in group] for group in groups]
        if self.processes.world_size == 1:
            return whole
        records = sum(len(_variants_of(unit)) for unit in whole)
        size = max(1, records // (UNITS_PER_PROCESS * self.processes.world_size))
        units = [part for unit in whole for part in _parted(unit, size)]
        return sorted(units, key=self._weight, reverse=True)

    def _weight(self, unit: Unit) -> float:
        at_once, steps = total_work(unit, self.config.question == "decode", self.examples)
        return at_once / _TOKENS_PER_STEP + steps

    def _done(self) -> set[RecordKey]:
        return {record_key(record) for record in self.store.records() if record["error"] is None}

    def expected_seconds(self, wanted: Sequence[tuple[Item, Sequence[Variant]]]) -> float | None:
        """Estimate the seconds that the wanted records will take which do not exist yet; None for a short run."""
        done = self._done()
        missing = [(item, _without(done, item, variants)) for item, variants in wanted]
        work = total_work(missing, self.config.question == "decode", self.examples)
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
    beside: Sequence[Path] = (),
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
    beside : sequence of Path
        Results folders of the run's sweep, whose samples must be the same where they are of the same name.

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
    with processes.agreed():  # all have looked at the folder before one of them writes there
        settings = {**config.as_json(), "protocol_sha256": sha256}
        template = None
        if config.chat_template is not None:
            template = read_chat_template(config.chat_template, protocol_dir)
            settings["chat_template_sha256"] = hashlib.sha256(template.encode()).hexdigest()
        settings = identity(settings)
        store.check(settings)  # reads only: the folder is claimed once the run is known to be valid
        store.records()  # reports a damaged file before the work, not after
        prepared = prepare(config, benchmark, template, variants, source, on_refusal)
        store.check(settings, prepared.files)
        store.check_beside(beside, config.as_json(), prepared.files)
        model = source.load(config)
        patchable = usable(prepared.variants, lambda variant: check_patchable(model, variant), on_refusal)
    with _claimed(store, settings, prepared.files, processes):
        engine = Engine(model, prepared.tokenizer, config)
        provenance = {**engine.machine, "seed": config.seed, "protocol": protocol, "protocol_sha256": sha256}
        yield Session(config, prepared.items, patchable, engine, store, processes, provenance)


def _built(item: Item) -> Sample | None:
    """Return an item's sample, or None if it cannot be built any more."""
    try:
        return item.build()
    except Exception:  # as in a run, one bad sample must not end it
        return None


def _is_older(record: dict[str, Any]) -> bool:
    """Return whether a record of an answered sample does not say whether its prompt was cut."""
    return record["error"] is None and record.get("truncated") is None


def _is_of(sample: Sample | None, record: dict[str, Any]) -> bool:
    """Return whether prompt and question of a sample have as many tokens as a record says."""
    if sample is None:
        return False
    question = len(sample.question_ids)
    return (record["prompt_tokens"], record["question_tokens"]) == (len(sample.material_ids) + question, question)


def _without(done: set[RecordKey], item: Item, variants: Sequence[Variant]) -> list[Variant]:
    """Return an item's variants that have no record yet."""
    return [variant for variant in variants if key_of(item, variant) not in done]


def _variants_of(unit: Unit) -> list[Variant]:
    """Return each variant of a unit once, in order."""
    return list(dict.fromkeys(variant for _, variants in unit for variant in variants))


def _parted(unit: Unit, size: int) -> list[Unit]:
    """Divide a unit into several with at most ``size`` of its variants each."""
    variants = _variants_of(unit)
    parts = [variants[start : start + size] for start in range(0, len(variants), size)]
    return [[(item, [each for each in own if each in part]) for item, own in unit] for part in parts]


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
def _claimed(store: Store, config: dict[str, Any], files: TaskFiles, processes: Processes) -> Iterator[None]:
    with processes.agreed():
        if processes.is_main:
            store.claim(config, files)
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
