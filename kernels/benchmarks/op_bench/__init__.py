"""Parts of ``kernels/benchmarks/run.py``: shapes, data, ops, dense backends, timing, results, tables."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

# A checkout runs without being installed.
sys.path.insert(1, str(ROOT / "kernels" / "torch-ext"))
