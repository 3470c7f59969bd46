"""Shapes drawn at random, for ops whose own tests have chosen ones; every check is one of those tests."""

from __future__ import annotations

import math
from unittest import mock

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.ops.attention import test_dense_decode as dense_decode
from tests.ops.attention import test_dense_prefill as dense_prefill
from tests.ops.attention import test_sparse_decode as sparse_decode
from tests.ops.attention import test_sparse_prefill as sparse_prefill
from tests.ops.blocks import test_block_sparse_prefill as block_sparse_prefill
from tests.ops.centroids import test_centroid_weights as centroid_weights
from tests.ops.centroids import test_lookup_runs as lookup_runs
from tests.ops.codes import test_append_and_attend_tokens as code_step
from tests.ops.codes import test_append_and_select_tokens as append_and_select_tokens
from tests.ops.codes import test_code_scores as code_scores
from tests.ops.codes import test_encode_keys as encode_keys
from tests.ops.emulation import on_device
from tests.ops.helpers import IMPLS, int32, make_rows
from tests.ops.kmeans import test_cluster_sums as cluster_sums
from tests.ops.kmeans import test_nearest_centres as nearest_centres
from tests.ops.offload import test_keep_chosen as keep_chosen
from tests.ops.offload import test_load_blocks as load_blocks
from tests.ops.pages import test_append_and_rank as append_and_rank
from tests.ops.pages import test_append_and_select as append_and_select
from tests.ops.pages import test_int8_bounds as int8_bounds
from tests.ops.pages import test_page_bounds as page_bounds
from tests.ops.pages import test_page_scores as page_scores
from tests.ops.products import test_one_row_linear as one_row_linear
from tests.ops.progressive import inputs as progressive
from tests.ops.progressive import test_progressive_decode as progressive_decode
from tests.ops.psa import test_append_and_attend_progressively as psa_step
from tests.ops.quest import test_append_and_attend as quest_step
from tests.ops.runs import test_runs_decode as runs_decode
from tests.ops.runs import test_runs_prefill as runs_prefill
from tests.ops.sums import test_one_shot_all_reduce as one_shot_all_reduce
from tests.ops.tokens import test_mean_query as mean_query
from tests.ops.tokens import test_select_tokens as select_tokens
from tests.ops.tokens import test_token_votes as token_votes

DTYPES = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))
HEAD_DIMS = st.sampled_from((16, 24, 64, 80, 96, 128, 160, 192, 256))
LENGTHS = st.lists(st.integers(0, 120), min_size=1, max_size=3).filter(any)
REDUCTIONS = ("softmax", "mean", "max")
few = settings(max_examples=6, deadline=None, derandomize=True)  # tolerances are those of the numbers drawn
FEWEST = 512


def assume_enough(*counts: int) -> None:
    """Assume that results have so many numbers that the greatest error of eager attention is not small by chance."""
    assume(math.prod(counts) >= FEWEST)


def filled(lengths: list[int]) -> int:
    """Return the number of rows that have tokens."""
    return sum(length > 0 for length in lengths)


@few
@given(
    lengths=LENGTHS,
    block_size=st.sampled_from((1, 3, 16, 32)),
    max_blocks=st.integers(1, 20),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_dim=HEAD_DIMS,
    dtype=DTYPES,
)
def test_sparse_decode(**drawn):
    assume_enough(filled(drawn["lengths"]), drawn["kv_heads"], drawn["group"], drawn["head_dim"])
    sparse_decode.test_error_is_bounded_by_the_eager_error(**drawn)


@few
@given(
    lengths=LENGTHS,
    queries=st.integers(1, 80),
    most=st.integers(1, 90),
    shared=st.booleans(),
    rope=st.booleans(),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 4),
    head_dim=HEAD_DIMS,
    dtype=DTYPES,
)
def test_sparse_prefill(**drawn):
    assume_enough(filled(drawn["lengths"]), drawn["kv_heads"], drawn["group"], drawn["head_dim"])
    sparse_prefill.test_error_is_bounded_by_the_eager_error(**drawn)


@few
@given(
    lengths=LENGTHS,
    queries=st.integers(1, 60),
    block_size=st.sampled_from((16, 32, 64)),
    columns=st.booleans(),
    window=st.none() | st.integers(1, 60),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    head_dim=HEAD_DIMS,
    dtype=DTYPES,
)
def test_block_sparse_prefill(lengths, queries, **drawn):
    assume_enough(filled(lengths), drawn["kv_heads"], drawn["group"], drawn["head_dim"])
    block_sparse_prefill.test_error_is_bounded_by_the_eager_error(lengths, min(queries, max(lengths)), **drawn)


RUNS = {"kv_heads": st.integers(1, 5), "group": st.integers(1, 8), "head_dim": HEAD_DIMS, "dtype": DTYPES}
PAIRS = st.lists(st.tuples(st.integers(1, 150), st.integers(0, 80)), min_size=1, max_size=3)
"""Tokens of a context, and of the tail behind it."""


@few
@given(pairs=PAIRS, in_place=st.booleans(), options=st.fixed_dictionaries(RUNS))
def test_runs_decode(pairs, in_place, options):
    assume_enough(len(pairs), options["kv_heads"], options["group"], options["head_dim"])
    sizes, tails = map(list, zip(*pairs, strict=True))
    runs_decode.test_error_is_bounded_by_the_eager_error(sizes, tails, {**options, "in_place": in_place})


@few
@given(pairs=PAIRS, queries=st.integers(1, 60), options=st.fixed_dictionaries(RUNS))
def test_runs_prefill(pairs, queries, options):
    assume_enough(queries, options["kv_heads"], options["group"], options["head_dim"])
    sizes, tails = map(list, zip(*pairs, strict=True))
    tails[0] = max(tails[0], queries)  # a row's queries are the last tokens of its tail
    runs_prefill.test_error_is_bounded_by_the_eager_error(sizes, tails, queries, options)


@few
@given(
    lengths=LENGTHS,
    sink_tokens=st.integers(0, 6),
    recent_tokens=st.integers(0, 9),
    others=st.integers(1, 70),
    heads=st.fixed_dictionaries({"kv_heads": st.integers(1, 3), "group": st.integers(1, 5)}),
    head_dim=HEAD_DIMS,
    dtype=DTYPES,
)
def test_select_tokens(lengths, sink_tokens, recent_tokens, others, heads, head_dim, dtype):
    rows = make_rows(lengths, head_dim=head_dim, dtype=dtype, **heads)
    budget = {"sink_tokens": sink_tokens, "recent_tokens": recent_tokens}
    for impl in IMPLS:
        most = sink_tokens + recent_tokens + others
        select_tokens._check(rows, impl, num_tokens=max(lengths), max_tokens=most, **budget)


@few
@given(
    block_size=st.integers(1, 40),
    head_dim=st.integers(1, 130),
    blocks=st.integers(1, 9),
    dtype=st.sampled_from(load_blocks.DTYPES),
    impl=st.sampled_from(IMPLS),
)
def test_load_blocks(**drawn):
    load_blocks.test_blocks_are_copied_and_others_left_alone(**drawn)


@few
@given(
    groups=st.integers(1, 3),
    n=st.integers(1, 150),
    num_centres=st.integers(1, 150),
    dim=st.integers(1, 140),
    dtype=DTYPES,
    impl=st.sampled_from(IMPLS),
)
def test_nearest_centres(**drawn):
    nearest_centres.test_finds_the_nearest_centre(**drawn)


@few
@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=12).filter(any),
    groups=st.integers(1, 3),
    dim=st.integers(1, 140),
    dtype=DTYPES,
    impl=st.sampled_from(IMPLS),
)
def test_cluster_sums(sizes, **drawn):
    with mock.patch.dict(cluster_sums.SIZES, drawn=sizes):
        cluster_sums.test_is_the_sum_of_the_members(name="drawn", **drawn)


CLUSTER = {"cluster": 3, "threads": 256}  # a small one, since on a CPU each has a thread for every thread
LONGER = st.lists(st.one_of(st.integers(0, 70), st.integers(0, 1500)), min_size=1, max_size=3).filter(any)
GROUPS = st.sampled_from((1, 5))  # on a CPU a kernel is compiled for each


@few
@given(
    lengths=LONGER, kv_heads=st.integers(1, 3), group=GROUPS, group_reduce=st.sampled_from(("softmax", "mean", "max"))
)
def test_quest_steps_on_clusters(**drawn):
    with on_device(quest_step.cluster, "quest_step"):
        quest_step.test_clusters_choose_and_write_what_the_reference_does(CLUSTER, **drawn)


@few
@given(
    lengths=LONGER,
    kv_heads=st.integers(1, 3),
    group=GROUPS,
    options=st.fixed_dictionaries(
        {
            "microbatch": st.integers(1, 16),
            "threshold": st.sampled_from((0.05, 0.5, 0.9, 0.999, 1.0)),
            "sink_blocks": st.integers(0, 3),
            "recent_blocks": st.integers(1, 3),
            "max_blocks": st.integers(6, 60),
            "rest": st.sampled_from(("least", "last")),
            "statistic": st.sampled_from(("cuboid_mean", "minmax")),
        }
    ),
)
def test_psa_steps_on_clusters(**drawn):
    with on_device(psa_step.cluster, "progressive_step"):
        psa_step.test_clusters_read_and_write_what_the_reference_does(CLUSTER, **drawn)


@few
@given(
    lengths=LONGER,
    kv_heads=st.integers(1, 3),
    group=GROUPS,
    group_reduce=st.sampled_from(("softmax", "max")),
    max_tokens=st.integers(68, 1100),
    correction=st.sampled_from(("unbiased", "least_squares")),
)
def test_code_steps_on_clusters(**drawn):
    with on_device(code_step.cluster, "key_codes_step"):
        code_step.test_clusters_choose_and_write_what_the_reference_does(CLUSTER, **drawn)


SHAPES = {
    "kv_heads": st.integers(1, 3),
    "group": st.integers(1, 9),
    "head_dim": HEAD_DIMS,
    "dtype": DTYPES,
}


@few
@given(lengths=LENGTHS, shape=st.fixed_dictionaries(SHAPES))
def test_dense_decode(lengths, shape):
    assume_enough(filled(lengths), shape["kv_heads"], shape["group"], shape["head_dim"])
    dense_decode.test_error_is_bounded_by_the_eager_error(lengths, **shape)


@few
@given(
    lengths=LENGTHS,
    queries=st.integers(1, 20),
    # In float32 the eager error of a few numbers may be far below a rounding of the largest one.
    shape=st.fixed_dictionaries({**SHAPES, "dtype": st.sampled_from((torch.bfloat16, torch.float16))}),
)
def test_dense_prefill(lengths, queries, shape):
    assume_enough(filled(lengths), shape["kv_heads"], shape["group"], shape["head_dim"])
    dense_prefill.test_error_is_bounded_by_the_eager_error(lengths, queries, **shape)


@few
@given(
    lengths=LENGTHS,
    block_size=st.sampled_from((1, 5, 16, 48)),
    microbatch=st.integers(1, 9),
    threshold=st.floats(0.3, 0.99),
    rest=st.sampled_from(("least", "last")),
    forced_blocks=st.integers(0, 5),
    shape=st.fixed_dictionaries(SHAPES),
)
def test_progressive_decode(lengths, shape, **drawn):
    case = progressive.make_progressive(lengths, **drawn, **shape)
    # Nearer to the threshold a rounding decides.
    assume(progressive.one_block_at_a_time(case).margin.min() > progressive_decode.NEAR)
    progressive_decode.check(case)


@few
@given(
    block_size=st.integers(1, 20),
    slots=st.integers(1, 40),
    head_dim=HEAD_DIMS,
    dtype=DTYPES,
    shared=st.booleans(),
    impl=st.sampled_from(IMPLS),
)
def test_keep_chosen(**drawn):
    keep_chosen.test_steps_of_growing_rows(**drawn)


CLUSTERS = {
    "clusters": st.integers(1, 150),
    "group": st.integers(1, 9),
    "head_dim": HEAD_DIMS,
    "shared": st.booleans(),
    "coarse": st.integers(0, 12),
}


@few
@given(queries=st.integers(1, 20), dtype=DTYPES, drawn=st.fixed_dictionaries(CLUSTERS))
def test_centroid_weights(queries, dtype, drawn):
    centroid_weights.check_errors(centroid_weights.make_lookup(queries=queries, dtype=dtype, **drawn))


@few
@given(max_tokens=st.none() | st.tuples(*[st.integers(0, 150)] * 2), drawn=st.fixed_dictionaries(CLUSTERS))
def test_lookup_runs(max_tokens, drawn):
    arguments = lookup_runs.make_arguments(**drawn)
    lookup_runs.check_lookup(arguments if max_tokens is None else {**arguments, "max_tokens": int32(max_tokens)})


@few
@given(
    impl=st.sampled_from(IMPLS),
    dtype=DTYPES,
    queries=st.integers(1, 200),
    head_dim=st.integers(1, 128).map(lambda half: 2 * half),
    first_slot=st.integers(0, 140),
)
def test_mean_query(**drawn):
    mean_query.test_is_the_mean_of_the_rotated_queries(**drawn)


@few
@given(
    impl=st.sampled_from(IMPLS),
    weight_is_ready=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64)),
    with_bias=st.booleans(),
    out_features=st.integers(1, 600),
    in_features=st.integers(1, 5000),
)
def test_one_row_linear(**drawn):
    one_row_linear.check_product(**drawn)


@few
@given(
    impl=st.sampled_from(IMPLS),
    by=st.sampled_from(("add", "mul")),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64)),
    out_features=st.integers(1, 600),
    in_features=st.integers(1, 2000),
)
def test_combined_one_row_linear(**drawn):
    one_row_linear.check_combination(**drawn)


@few
@given(
    impl=st.sampled_from(IMPLS),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    processes=st.integers(2, 8),
    data=st.data(),
    count=st.integers(1, 600).map(lambda half: 2 * half),
)
def test_one_shot_all_reduce(data, processes, **drawn):
    one_shot_all_reduce.check_sum(processes=processes, rank=data.draw(st.integers(0, processes - 1)), **drawn)


@few
@given(
    vote=st.sampled_from(("soft", "logits")),
    lengths=LENGTHS,
    sink_tokens=st.integers(0, 9),
    recent_tokens=st.integers(0, 9),
    shape=st.fixed_dictionaries(SHAPES),
)
def test_token_votes(vote, lengths, sink_tokens, recent_tokens, shape):
    assume(max(lengths) > sink_tokens + recent_tokens)
    token_votes.test_error_is_bounded_by_that_of_the_reference(vote, lengths, sink_tokens, recent_tokens, **shape)


PAGE_SIZES = st.sampled_from((1, 2, 8, 16, 32, 64))
KEYS = {"kv_heads": st.integers(1, 3), "head_dim": HEAD_DIMS, "dtype": DTYPES}


@few
@given(
    impl=st.sampled_from(IMPLS),
    lengths=LENGTHS,
    page_size=PAGE_SIZES,
    num_new=st.integers(1, 130),
    keys=st.fixed_dictionaries(KEYS),
)
def test_page_bounds(impl, lengths, page_size, num_new, keys):
    page_bounds.test_touched_pages_are_exact_and_others_untouched(impl, lengths, page_size, num_new, **keys)
    int8_bounds.test_new_rows_are_exact_and_the_rest_untouched(impl, lengths, page_size, **keys)


@few
@given(lengths=LENGTHS, group_reduce=st.sampled_from(REDUCTIONS), shape=st.fixed_dictionaries(SHAPES))
def test_page_scores(lengths, group_reduce, shape):
    page_scores.test_scores_and_choice_agree(lengths, group_reduce=group_reduce, **shape)
    int8_bounds.test_scores_follow_the_formula_and_bound_every_token(lengths, group_reduce=group_reduce, **shape)


STEPS = {
    "impl": st.sampled_from(IMPLS),
    "int8": st.booleans(),
    "lengths": LENGTHS,
    "page_size": PAGE_SIZES,
    "group_reduce": st.sampled_from(REDUCTIONS),
    "statistic": st.sampled_from(("minmax", "cuboid_mean", "representative")),
    **SHAPES,
}


@few
@given(drawn=st.fixed_dictionaries(STEPS))
def test_append_and_select(drawn):
    append_and_select.test_equals_its_parts(**drawn)


@few
@given(
    drawn=st.fixed_dictionaries(STEPS),
    forced=st.fixed_dictionaries({"sink_blocks": st.integers(0, 3), "recent_blocks": st.integers(1, 3)}),
    max_blocks=st.none() | st.integers(6, 20),
)
def test_append_and_rank(drawn, forced, max_blocks):
    pages = -(-max(drawn["lengths"]) // drawn["page_size"])
    assume(sum(forced.values()) <= (max_blocks or pages))
    append_and_rank.test_equals_its_parts(**drawn, forced={**forced, "max_blocks": max_blocks})


CODES = {
    "kv_heads": st.integers(1, 3),
    "head_dim": st.sampled_from((8, 40, 64, 80, 128, 256)),
    "page_size": st.sampled_from((16, 32, 48, 64)),
    "bits": st.integers(1, 2),
    "centred": st.booleans(),
    "dtype": DTYPES,
}
SHARED = {"shared": st.booleans()}
GROUP = {"group": st.integers(1, 9)}


@few
@given(
    impl=st.sampled_from(IMPLS),
    lengths=LENGTHS,
    options=st.fixed_dictionaries(
        {**CODES, **SHARED, "correction": st.sampled_from(("unbiased", "least_squares"))},
    ),
)
def test_encode_keys(impl, lengths, options):
    encode_keys.test_codes_are_those_of_the_definition(impl, lengths, options)


@few
@given(
    impl=st.sampled_from(IMPLS),
    group_reduce=st.sampled_from(("max", "softmax")),
    lengths=LENGTHS,
    options=st.fixed_dictionaries({**CODES, **SHARED, **GROUP}),
)
def test_code_scores(impl, group_reduce, lengths, options):
    code_scores.test_scores_are_those_of_the_definition(impl, group_reduce, lengths, options)


@few
@given(
    impl=st.sampled_from(IMPLS),
    group_reduce=st.sampled_from(("max", "softmax")),
    lengths=LENGTHS,
    options=st.fixed_dictionaries({**CODES, **GROUP}),
)
def test_append_and_select_tokens(impl, group_reduce, lengths, options):
    append_and_select_tokens.test_steps_do_what_the_parts_do(impl, lengths, options, group_reduce)
