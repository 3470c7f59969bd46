"""Records of a run: entries with floors and ratios, the machine, the JSON file, and the comparison of two files."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from op_bench.shapes import Shape

NOMINAL_BYTES_PER_SECOND = 4.27e12
"""Copy bandwidth of one H200, read and written. Floors are given for it and for the measured device."""
WAYS = ("replay", "layers")
OURS = "dense_decode (ours)"
PACKAGES = ("torch", "triton", "transformers", "flashinfer-python")
MARGIN = 0.05
"""Fraction by which a time must grow to count as slower."""

Record = dict[str, Any]


class ResultsError(Exception):
    """Two results files cannot be compared, or a file has no results."""


def shape_record(shape: Shape) -> Record:
    """Convert a shape to its JSON record."""
    return {"name": shape.name, **asdict(shape)}


def shape_of(record: Mapping[str, Any]) -> Shape:
    """Return the shape of an entry's or a dense backend's record."""
    return Shape(**{key: value for key, value in record["shape"].items() if key != "name"})


def floors_us(moved_bytes: int, copy_bytes_per_second: float) -> dict[str, float]:
    """Return the time in µs to move ``moved_bytes``, at the nominal bandwidth and at the device's own."""
    return {
        "nominal": 1e6 * moved_bytes / NOMINAL_BYTES_PER_SECOND,
        "copy": 1e6 * moved_bytes / copy_bytes_per_second,
    }


def over_floor(times: Mapping[str, Any], floors: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return medians divided by floors, for each way of timing."""
    return {way: {name: times[way]["median"] / floor for name, floor in floors.items()} for way in WAYS}


def against_dense(
    times: Mapping[str, Any], dense: Sequence[Mapping[str, Any]], ours: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Compute the speed-up over dense attention.

    Parameters
    ----------
    times : mapping
        Times of the entry.
    dense : sequence of mapping
        Records of other libraries' backends at the same shape; those without times are ignored.
    ours : mapping or None
        Times of this package's ``dense_decode`` at the same shape.

    Returns
    -------
    dict or None
        For each way of timing, ``best`` and ``ratio`` against the best of the others, and ``best_with_ours`` and
        ``ratio_with_ours``, which include ``dense_decode``. None if none of the others has a time.
    """
    found = {}
    for way in WAYS:
        medians = {record["backend"]: record["times"][way]["median"] for record in dense if record["times"]}
        if not medians:
            return None
        mine = times[way]["median"]
        best = min(medians, key=medians.__getitem__)
        with_ours = medians | ({OURS: ours[way]["median"]} if ours else {})
        best_with_ours = min(with_ours, key=with_ours.__getitem__)
        found[way] = {
            "best": best,
            "best_us": medians[best],
            "ratio": medians[best] / mine,
            "best_with_ours": best_with_ours,
            "ratio_with_ours": with_ours[best_with_ours] / mine,
        }
    return found


def machine_record(device: str, rates: Mapping[str, float], command: str, root: Path) -> Record:
    """Describe the machine, its measured rates by name, versions, date and command of a run."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "device": device,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        **versions,
        **rates,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _clean_commit(root),
        "command": command,
    }


def _clean_commit(root: Path) -> str | None:
    """Return the measured commit; None if the checkout differs from it."""
    changed = _output("git", "-C", str(root), "status", "--porcelain")
    return None if changed else _output("git", "-C", str(root), "rev-parse", "--short", "HEAD")


def _output(*command: str) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip().split("\n")[0] or None


def file_stem(device: str) -> str:
    """Convert a device's name to a file name."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def write(report: Record, path: Path) -> None:
    """Write a report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Record:
    """Read a report.

    Raises
    ------
    ResultsError
        The file cannot be read, or is not a results file.
    """
    try:
        report: Record = json.loads(path.read_text(encoding="utf-8"))
        report["machine"]["device"], report["entries"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"{path} is not a results file: {error!r}") from error
    return report


def entry_key(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the name of an entry within a report."""
    return entry["op"], entry["variant"], entry["shape"]["name"]


def merged(old: Record, new: Record) -> Record:
    """Merge a run's entries into an older report of the same device; new entries replace those of the same name.

    New entries get a ``machine`` of their own with the values that differ: date, command, versions.

    Raises
    ------
    ResultsError
        The runs have different settings.
    """
    shared = old["settings"].keys() & new["settings"].keys()
    differing = [name for name in sorted(shared) if old["settings"][name] != new["settings"][name]]
    if differing:
        raise ResultsError(f"the file's results have other settings: {', '.join(differing)}")
    changed = {key: value for key, value in new["machine"].items() if old["machine"].get(key) != value}
    result = {**old, "settings": old["settings"] | new["settings"]}
    keys: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "entries": entry_key,
        "dense": lambda record: (record["backend"], record["shape"]["name"]),
        "skipped": lambda record: record["shape"]["name"],
    }
    for part, key_of in keys.items():
        records = {key_of(record): record for record in old[part]}
        records |= {key_of(record): {**record, "machine": changed} for record in new[part]}
        result[part] = list(records.values())
    return result


def machine_of(report: Mapping[str, Any], record: Mapping[str, Any]) -> Record:
    """Return the machine, versions, date and command of a record of a report."""
    return {**report["machine"], **record.get("machine", {})}


def check_device(old: Record, device: str, force: bool) -> None:
    """Raise if two reports are of different devices.

    Raises
    ------
    ResultsError
        The devices differ, and ``force`` is not set.
    """
    if old["machine"]["device"] != device and not force:
        raise ResultsError(
            f"the old results are from {old['machine']['device']!r}, these from {device!r}; --force compares them "
            "anyway"
        )


def compare(old: Record, new: Record, margin: float = MARGIN) -> tuple[list[str], int]:
    """Compare two reports.

    Returns
    -------
    lines : list of str
        A table: old and new medians in µs and their quotient, for each way of timing.
    slower : int
        Number of times that are slower by more than ``margin``.
    """
    before = {entry_key(entry): entry["times"] for entry in old["entries"] if entry["times"]}
    lines = [f"{'':52} {'way':>6} {'old, us':>10} {'new, us':>10} {'new/old':>8}"]
    slower = 0
    for entry in new["entries"]:
        key = entry_key(entry)
        if key not in before or not entry["times"]:
            continue
        for way in WAYS:
            then, now = before[key][way]["median"], entry["times"][way]["median"]
            is_slower = now > then * (1 + margin)
            slower += is_slower
            name = f"{key[2]} {key[0]} {key[1]}"
            lines.append(f"{name:52} {way:>6} {then:10.2f} {now:10.2f} {now / then:8.3f}{' SLOWER' * is_slower}")
    return lines, slower
