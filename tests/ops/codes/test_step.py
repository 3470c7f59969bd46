"""The three ops one after another, as a decode step calls them."""

import pytest
import torch
from hf_sparse_attn_kernels import code_scores, encode_keys, select_tokens_by_score
from torch._dynamo.testing import CompileCounterWithBackend

from tests.ops.codes.inputs import make_coded
from tests.ops.helpers import IMPLS, device

BUDGET = {"max_tokens": 40, "sink_tokens": 4}


def _step(query, keys, seq_start, seq_end, query_centre, coded, codes, bits=1, impl=None):
    """Code the page that has filled, and choose tokens."""
    rows = {"seq_start": seq_start, "seq_end": seq_end}
    options = {"page_size": 16, "bits": bits, "query_centre": query_centre, "impl": impl}
    encode_keys(keys, coded=coded, max_pages=1, **codes, **rows, **options)
    scores = code_scores(query, group_reduce="softmax", **codes, **rows, **options)
    return select_tokens_by_score(scores, **rows, page_size=16, impl=impl, **BUDGET)


def _arguments(coded, lengths):
    ends = coded.ends(lengths)
    return (coded.rows.query, coded.rows.keys, *ends.values(), coded.options["query_centre"], coded.coded)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bits", [1, 2])
def test_tokens_that_matter_are_chosen_wherever_they_lie(impl, bits):
    coded = make_coded([160, 131], group=3, head_dim=80, bits=bits)
    rows, needles = coded.rows, [2, 17, 31, 32, 63, 100, 127]
    for row in range(2):
        for head in range(2):
            direction = rows.query[row, 3 * head : 3 * head + 3].sum(dim=0)
            positions = rows.start[row].item() + torch.tensor(needles, device=device)
            rows.keys[row, head, positions] += 2 * direction
    coded.encode([127, 127], impl=impl)
    for lengths in ([128, 128], [160, 129], [160, 131]):
        indices, counts = _step(*_arguments(coded, lengths), coded.metadata, bits, impl)
        assert (counts == 40).all()
        for length, of_row in zip(lengths, indices.tolist(), strict=True):
            newest_page = range((length - 1) // 16 * 16, length)
            for chosen in of_row:
                assert {*range(4), *needles, *newest_page} <= set(chosen)


@torch.no_grad()
def test_compiled_steps_are_one_graph_with_the_same_results():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_step, fullgraph=True, backend=counter)
    eager, traced = (make_coded([70, 50], group=3) for _ in range(2))
    for coded in (eager, traced):
        coded.encode([60, 40])
    for lengths in ([63, 47], [64, 48], [65, 49], [70, 50]):
        expected = _step(*_arguments(eager, lengths), eager.metadata)
        found = compiled(*_arguments(traced, lengths), traced.metadata)
        for first, second in zip((*found, *traced.tensors()), (*expected, *eager.tensors()), strict=True):
            torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    assert counter.frame_count == 1
