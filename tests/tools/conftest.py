"""Only `make test-quantized` runs the tests of quantized weights, because torchao slows every Transformers import."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torchao") else ["test_quantized.py"]
