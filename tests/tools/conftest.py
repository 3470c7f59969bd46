"""`make test-quantized` alone runs the tests of quantized weights: torchao slows every import of Transformers."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torchao") else ["test_quantized.py"]
