"""The benchmarks are a script's modules, not an installed package: their folder is put on the path."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "kernels" / "benchmarks"))
