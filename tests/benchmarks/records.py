"""Records of measured times, as the benchmarks write them, with any times."""

from op_bench import results
from op_bench.shapes import Shape


def times(layers, replay=None):
    each = {"layers": layers, "replay": layers + 5 if replay is None else replay}
    return {way: {"min": us, "q1": us, "median": us, "q3": us, "samples": 1} for way, us in each.items()}


def entry(shape, us, dense_us, op="quest_step", variant="int8"):
    dense = [{"backend": "SDPA cuDNN", "times": times(dense_us)}, {"backend": "SDPA flash", "times": None}]
    floors = results.floors_us(4_270_000, 4e12)
    return {
        "op": op, "variant": variant, "shape": results.shape_record(shape), "layers": 8, "bytes": 4_270_000,
        "floor_us": floors, "times": times(us), "over_floor": results.over_floor(times(us), floors),
        "against": results.against_dense(times(us), dense, None), "error": None,
    }  # fmt: skip


def report(*entries, device="NVIDIA H200"):
    return {
        "machine": {"device": device, "torch": "2.11", "triton": "3.6", "driver": None, "date": "2026-01-02T03:04:05"},
        "settings": {"token_budget": 2048, "page_size": 16},
        "entries": list(entries),
        "dense": [
            {"backend": "SDPA cuDNN", "shape": each["shape"], "times": times(100.0), "error": None} for each in entries
        ],
        "skipped": [],
    }


SHORT, LONG = (Shape(32, 8, 128, 1, 1024 * length) for length in (8, 32))
