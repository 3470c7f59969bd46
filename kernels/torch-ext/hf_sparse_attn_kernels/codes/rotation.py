"""The fixed rotation of the residuals, the same on every machine and in every version of torch."""

import math
from random import Random

import torch

from .shared import shared

SEED = 20


@shared
def rotation(head_dim: int, device: torch.device) -> torch.Tensor:
    """Return an orthogonal matrix, float32 [head_dim, head_dim], contiguous. It is shared: do not write to it.

    A Hadamard matrix with random signs if head_dim is a power of two. Otherwise Q of the QR decomposition of a Gaussian
    matrix, with the signs for which R's diagonal is positive, so that it does not depend on the library.
    """
    random = Random(SEED)
    if head_dim & (head_dim - 1) == 0:
        matrix = torch.ones(1, 1, dtype=torch.float64, device="cpu")
        while len(matrix) < head_dim:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
        signs = [1.0 if random.random() < 0.5 else -1.0 for _ in range(head_dim)]
        matrix = matrix * torch.tensor(signs, dtype=torch.float64, device="cpu") / math.sqrt(head_dim)
    else:
        normal = [_normal(random) for _ in range(head_dim**2)]
        gaussian = torch.tensor(normal, dtype=torch.float64, device="cpu")
        matrix, upper = torch.linalg.qr(gaussian.view(head_dim, head_dim))
        matrix = matrix * upper.diagonal().sign()
    return matrix.float().contiguous().to(device)


@shared
def rotation_levels(head_dim: int, device: torch.device) -> tuple[torch.Tensor, float]:
    """Return the rotation as whole numbers, int8 [head_dim, head_dim], contiguous, and their unit. It is shared.

    Exact if head_dim is a power of two: all are 1 or -1. Otherwise rounded to 127 units of the greatest magnitude.
    """
    matrix = rotation(head_dim, torch.device("cpu")).double()
    unit = matrix.abs().amax() / (1 if head_dim & (head_dim - 1) == 0 else 127)
    return (matrix / unit).round().to(torch.int8).contiguous().to(device), unit.item()


def _normal(random: Random) -> float:
    """Draw from a standard normal distribution, by the transform of Box and Muller."""
    # Python promises the same sequence in all versions for `random()` alone.
    radius = math.sqrt(-2 * math.log(1 - random.random()))
    return radius * math.cos(2 * math.pi * random.random())
