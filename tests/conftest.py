"""Test-wide settings: offline hub, and Triton's interpreter where no CUDA device is present."""

import os

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
if not torch.cuda.is_available():
    # Read by Triton when a kernel is decorated, so it must be set before the kernels package is imported.
    os.environ["TRITON_INTERPRET"] = "1"
