"""The executor of a step whose forward and backward passes overlap, with or without a pipeline."""

from collections.abc import Callable
from typing import Any

import jax

from maxbench.config.run import Run
from maxbench.pipeline.executor import Executor, OneStage, Pipeline
from maxbench.pipeline.zero_overlap import ZeroOverlap


def executor(
    run: Run,
    w: Any,
    batch: Callable,
    zero: ZeroOverlap | None,
    documents: Callable,
    share: jax.Array | None,
) -> Executor:
    """The executor of a run, whose gradients() are those of the sum of transformer.loss_fn over all
    microbatches, for this GPU's weights; some of them are reduced already
    (ZeroOverlap.reduce_rest).

    Args:
      w: compute weights of this GPU; 'layers' in the stacks of layer_order, as
        ZeroOverlap.initial_weights returns them.
      batch: microbatch -> (tokens_bt, targets_bt).
      documents: tokens_bt -> documents_bt of sublayers.Context.
      share: as in transformer.lm_loss().
    """
    kind = Pipeline if run.layout.pp > 1 else OneStage
    return kind(run, w, batch, zero, documents, share)
