"""Claims of the papers, each beside what the result files of a checkout say of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from eval.claim_checks import (
    Check,
    evicting_passkeys,
    psa_reads,
    psa_reads_of_dense,
    psa_throughput,
    quest_longbench,
    quest_passkeys,
    quest_perplexity,
    quest_six_tasks,
    quest_step,
    quest_token,
    squeezed_kernels,
    squeezed_longbench,
    squeezed_table,
    tokenselect_chosen,
    tokenselect_chunk,
    tokenselect_infinitebench,
    tokenselect_length,
    tokenselect_prefill,
    tokenselect_ruler,
    tokenselect_votes,
)


@dataclass(frozen=True)
class Claim:
    """A claim of a paper."""

    paper: str
    """The method, with the number on arXiv."""
    says: str
    """The claim, with its models and devices."""
    checks: Callable[[Path], Iterable[Check]]
    """Returns our figures in a checkout; raises ``FileNotFoundError`` or ``LookupError`` if they are missing."""

    def row(self, root: Path) -> tuple[str, str, str, str]:
        """Return paper, claim, our figures, and whether it holds: yes, no or in part."""
        try:
            checks = list(self.checks(root))
        except (FileNotFoundError, LookupError):
            return self.paper, self.says, "not measured in this checkout", "-"
        held = [check.holds for check in checks]
        verdict = "yes" if all(held) else "in part" if any(held) else "no"
        return self.paper, self.says, "; ".join(check.what for check in checks), verdict


def claims_rows(root: Path) -> list[tuple[str, str, str, str]]:
    """Return the rows of the table of claims, of a checkout at ``root``."""
    return [claim.row(root) for claim in CLAIMS]


CLAIMS = (
    Claim(
        "Quest (2406.10774)",
        "attention 7.03x faster at 32K tokens, reading 2,048 (an RTX 4090)",
        quest_step,
    ),
    Claim(
        "Quest",
        "a token 2.23x faster",
        quest_token,
    ),
    Claim(
        "Quest",
        "finds 99 % of passkeys in 10,000 tokens reading 64 (table 1, LongChat 7B)",
        quest_passkeys,
    ),
    Claim(
        "Quest",
        "methods that evict find at most 8 % of them keeping 512 of the 10,000",
        evicting_passkeys,
    ),
    Claim("Quest", "a negligible loss on long tasks", quest_longbench),
    Claim(
        "Quest",
        "perplexity of a book close to dense attention's, 0.2 % above it, and nearer than H2O's and TOVA's "
        "(figure 6, 4,096 of 32,000 tokens)",
        quest_perplexity,
    ),
    Claim(
        "Quest",
        "ahead of methods that evict on six LongBench tasks, and comparable to dense attention with 1,024 tokens "
        "(figure 7)",
        quest_six_tasks,
    ),
    Claim(
        "Squeezed Attention (2411.09688)",
        "LongBench with a 3.1x smaller KV budget and no noticeable loss (7B models)",
        squeezed_longbench(0.7, 3.1, 1),
    ),
    Claim(
        "Squeezed Attention",
        "up to 8x smaller with a gap of 0.5 points",
        squeezed_longbench(0.9, 8, 0.5),
    ),
    Claim(
        "Squeezed Attention",
        "these two budgets, which leave out 70 and 90 % of the keys, on the 14 LongBench tasks of table 2",
        squeezed_table("squeezed-2", "longbench"),
    ),
    Claim(
        "Squeezed Attention",
        "the same losses, claimed for LongBench, tried on RULER (the benchmark of table 3) with 8,192 tokens",
        squeezed_table("squeezed-3", "ruler"),
    ),
    Claim(
        "Squeezed Attention",
        "the same losses, tried on many questions over one text (as in table 4)",
        squeezed_table("squeezed-4", "prefixqa"),
    ),
    Claim(
        "Squeezed Attention",
        "kernels 4.2x (decode) and 4.3x (prefill) faster at 512K tokens, leaving 90 % out",
        squeezed_kernels,
    ),
    Claim(
        "TokenSelect (2411.02886)",
        "attention up to 23.84x faster in a prefill of 1M tokens",
        tokenselect_chunk,
    ),
    Claim("TokenSelect", "works beyond the trained length", tokenselect_length),
    Claim(
        "TokenSelect",
        "finds all passkeys and numbers and 86.6 % of values in InfiniteBench, dense 28.8, 28.6 and 19.0 % (table 1)",
        tokenselect_infinitebench,
    ),
    Claim(
        "TokenSelect",
        "81.8 % in RULER at 8,192 tokens and InfLLM 36.1 % with 2,688 tokens, 90.2 to 52.1 % with 8,320; at 16,384 "
        "tokens 68.7 to 29.4 % and 82.1 to 40.5 % (table 2)",
        tokenselect_ruler,
    ),
    Claim(
        "TokenSelect",
        "the soft vote finds 86.6 % of InfiniteBench's values, those by logits and by heads 16.6 and 22.4 % (table 4)",
        tokenselect_votes,
    ),
    Claim(
        "TokenSelect",
        "128 chosen tokens find all of InfiniteBench's numbers, and 13.4 % of its values, 2,048 find 86.6 % (table 5)",
        tokenselect_chosen,
    ),
    Claim(
        "TokenSelect",
        "a prefill of 10,000 tokens takes 1.29 s, a dense one 0.83 and MInference's 2.76; of 50,000 tokens 5.71, 7.72 "
        "and 7.54 (table 8, an 8B model on an A100)",
        tokenselect_prefill,
    ),
    Claim(
        "PSA (2503.00392)",
        "reads up to 2.4x less than a fixed number of blocks for the same accuracy",
        psa_reads,
    ),
    Claim(
        "PSA",
        "reads up to 8.8x less than dense attention, with high accuracy",
        psa_reads_of_dense,
    ),
    Claim(
        "PSA",
        "up to 2.0x the throughput of dense attention and 1.4x that of other sparse methods",
        psa_throughput,
    ),
)
"""Speeds and shares are the papers' own, of their abstracts where no table is named."""
