"""Puts the benchmarks' folder on the path: they are a script's modules, not an installed package."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "kernels" / "benchmarks"))
