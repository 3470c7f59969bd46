"""Helpers for tests of methods with key codes: decode steps that are watched, and the codes in plain torch."""

import torch
from hf_sparse_attn_kernels.codes.rotation import rotation

from hf_sparse_attn import SparseCache, record_selections, sparse_attention, sparse_attention_stats
from hf_sparse_attn.methods import FULL
from tests.models import DEVICE, ROUNDING, make_model, random_ids


def decode(model, cache, tokens):
    """Feed [batch, steps] tokens one by one, and return the logits."""
    return torch.cat([model(token, past_key_values=cache).logits for token in tokens.split(1, dim=1)], dim=1)


def check_forks_of_a_dense_prefill(model, method, ids, steps):
    """Assert that forks with the prompt's queries decode ``steps`` as a cache of their own does; others may not.

    Returns that cache, a fork of a dense cache that kept no queries, and the fork's logits.
    """
    with sparse_attention(model, FULL):
        kept, forgot = (SparseCache.for_model(model, keep_queries=number) for number in (1, 0))
        for cache in (kept, forgot):
            model(ids, past_key_values=cache)
    with sparse_attention(model, method):
        own = SparseCache.for_model(model)
        model(ids, past_key_values=own)
        expected = decode(model, own, steps)
        for _ in range(2):
            fork = kept.fork(method)
            torch.testing.assert_close(decode(model, fork, steps), expected, **ROUNDING)
        again = fork.fork(method)
        torch.testing.assert_close(*(decode(model, each, steps) for each in (again, own)), **ROUNDING)
        without = forgot.fork(method)
        logits = decode(model, without, steps)
        assert (without.layers[1].metadata["query_centre"] == 0).all()
    assert (logits - expected).abs().max() > 1e-3
    return own, without, logits


class Steps:
    """Keeps the queries of one layer's decode steps."""

    def __init__(self, monkeypatch, method_class, layer_idx=1):
        self.queries, self.layer = [], None
        decode = method_class.decode

        def seeing(method, query, layer, *rest):
            if layer.layer_idx == layer_idx:
                self.queries.append(query.double())
                self.layer = layer
            return decode(method, query, layer, *rest)

        monkeypatch.setattr(method_class, "decode", seeing)


def generate_watched(monkeypatch, method, head_dim, length, starts, options):
    """Generate after random prompts of ``length`` tokens with left padding, in float64.

    Returns the second layer's steps, the record of selections, and the stats.
    """
    model = make_model("llama", dtype=torch.float64, head_dim=head_dim, num_hidden_layers=2)
    ids, mask = random_ids(len(starts), length), torch.ones(len(starts), length, dtype=torch.long, device=DEVICE)
    for row, start in enumerate(starts):
        ids[row, :start] = mask[row, :start] = 0
    steps = Steps(monkeypatch, type(method))
    with sparse_attention(model, method), record_selections(model) as record:
        model.generate(ids, attention_mask=mask, **options)
        return steps, record, sparse_attention_stats(model)


def half(numbers):
    return numbers.to(torch.float16).double()


def stored(mean):
    """The centre that is stored for a mean key [d]: levels of 8 bits with one scale."""
    scale = half(mean.abs().max() / 127).clamp_min(2**-14)
    return (mean / scale).round().clamp(-127, 127) * scale


def estimates(query, keys, centre, bits, page_size, key_centre=None, correction="unbiased"):
    """Estimate q.k / sqrt(d) of [group, d] queries and the [n, d] keys of a KV head, in pages that are full.

    ``centre`` [d] is the query centre, ``key_centre`` that of all keys; without it each page has the mean of its own.
    """
    head_dim = keys.shape[1]
    rotate = rotation(head_dim, keys.device).double()
    columns = []
    for page in keys.split(page_size):
        page_centre = stored(page.mean(0)) if key_centre is None else key_centre
        residual = page - page_centre
        turned = residual @ rotate.T
        if bits == 1:
            symbols = torch.where(turned >= 0, 1.0, -1.0).to(turned)
        else:
            step = 0.9957 * turned.pow(2).mean(1, keepdim=True).sqrt()
            symbols = 2 * ((turned / step).floor() + 2).clamp(0, 3) - 3
        along = (turned * symbols).sum(1)
        factor = half(residual.pow(2).sum(1) / along if correction == "unbiased" else along / symbols.pow(2).sum(1))
        offset = half(residual @ centre * head_dim**-0.5) * head_dim**0.5
        dots = (query - centre) @ rotate.T @ symbols.T
        columns.append((query @ page_centre)[:, None] + offset + factor * dots)
    return torch.cat(columns, dim=1) * head_dim**-0.5
