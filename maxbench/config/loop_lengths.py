"""Loops of the step whose trip counts XLA does not know: their scopes, and their trips by run.

The step names the scopes, and planning tells the cost model their trips. Needs no jax.
"""

from maxbench.config.channels import Experts
from maxbench.config.run import Run

MICROBATCHES = "microbatches"  # named scope of the loop over microbatches
# That of the loop over further calls of cuDNN for packed documents (model/packed_attention.py).
DOCUMENT_GROUPS = "document_groups"


def blocks_scope(experts: int) -> str:
    """Named scope of a loop over the blocks of the experts of one GPU (model/grouped_matmul.py)."""
    return f"blocks_of_{experts}_experts"


def mean_rows(tokens: int, experts: int, top_k: int, gpus: int) -> int:
    """Rows of an expert, if the tokens of `gpus` GPUs choose all experts equally often."""
    return tokens * top_k * gpus // experts


def block_rows(mean_rows: int) -> int:
    """Rows of a block: a power of two, at least 8, so that an expert has 4 blocks or more if
    choices are even."""
    return 1 << max(3, (mean_rows // 4).bit_length() - 1)


def trip_counts(run: Run) -> dict[str, int]:
    """Scope of a loop -> its trips. Those over blocks depend on the choice of experts: they are the
    trips of an even choice. Those over documents depend on the data: the first call, before the
    loop, is priced as attention over whole sequences, which is no less than all calls together.
    """
    a, found = run.layout, {MICROBATCHES: run.layout.microbatches}
    if run.train.document_end is not None and run.train.attention != "xla":
        found[DOCUMENT_GROUPS] = 0
    for x in (layer.channel for _, layer in run.model.kinds):
        if isinstance(x, Experts) and not x.has_slots:
            tokens, local = a.mbs * run.train.seq // a.cp // a.tp, x.experts // a.ep
            rows = mean_rows(tokens, x.experts, x.top_k, a.ep * a.tp)
            found[blocks_scope(local)] = local * -(-rows // block_rows(rows))
    return found
