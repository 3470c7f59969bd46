"""Models that decode with steps on thread-block clusters, on the CPU by the kernels' sources compiled for it."""

import pytest
import torch
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels import use_impl

from hf_sparse_attn import sparse_attention, sparse_attention_stats
from tests.models import make_model, random_ids
from tests.ops.emulation import on_device, recorded_launches
from tests.ops.test_cluster_steps import FAMILIES

METHODS = {
    "quest": {"token_budget": 64, "dense_layers": 0},
    "keycodes": {"token_budget": 72},
    "psa": {"threshold": 0.9, "microbatch": 2, "dense_layers": 0},
}
NEW_TOKENS = 4


@pytest.mark.parametrize(("family", "method"), zip(FAMILIES, METHODS, strict=True), ids=list(METHODS))
def test_a_model_decodes_as_with_the_references(family, method, monkeypatch):
    # One layer: what another one reads would be rounded, and with it what it chooses.
    model = make_model("llama", dtype=torch.bfloat16, num_attention_heads=4, head_dim=128, num_hidden_layers=1)
    ids = random_ids(2, 400)
    mask = torch.ones_like(ids)
    mask[0, :61] = 0
    launches = recorded_launches(monkeypatch)

    def decode(impl):
        with sparse_attention(model, method, **METHODS[method]), use_impl(impl):
            output = model.generate(
                ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True,
                return_dict_in_generate=True, disable_compile=True,
            )  # fmt: skip
            return output, sparse_attention_stats(model)

    expected, read = decode("reference")
    assert not launches
    chosen = tuning.forced(**{family.choice: {"cluster": 3, "threads": 256}})
    with on_device(family.module, family.kernel), chosen:
        found, also_read = decode("cluster")
    assert len(launches) == NEW_TOKENS - 1
    assert 0 < also_read.kv_bytes < also_read.dense_bytes
    assert also_read.kv_bytes == read.kv_bytes
    for step, (ours, exact) in enumerate(zip(found.logits, expected.logits, strict=True)):
        torch.testing.assert_close(ours, exact, rtol=0, atol=2**-6 * exact.abs().max().item())
        tokens = (output.sequences[:, 400 : 401 + step] for output in (found, expected))
        if not torch.equal(*tokens):  # of two whose logits are as close
            break
    assert step > 0
