"""The gradients of a step whose forward and backward passes overlap, with or without a pipeline."""

from collections.abc import Callable
from typing import Any

import jax

from maxbench.config.run import Run
from maxbench.pipeline.executor import OneStage, Pipeline
from maxbench.pipeline.zero_overlap import ZeroOverlap


def gradients(
    run: Run,
    w: Any,
    grads: Any,
    batch: Callable,
    zero: ZeroOverlap | None,
    documents: Callable,
    share: jax.Array | None,
) -> Any:
    """Gradients of the sum of transformer.loss_fn over all microbatches, for this GPU's weights.

    Args:
      w: compute weights of this GPU; 'layers' in the stacks of layer_order, as
        ZeroOverlap.initial_weights returns them.
      grads: tree like w of zeros, in precision.grads.
      batch: microbatch -> (tokens_bt, targets_bt).
      documents: tokens_bt -> documents_bt of sublayers.Context.
      share: as in transformer.lm_loss().

    Returns:
      Gradients like `grads`, some of them reduced already (ZeroOverlap.reduce_rest), and this GPU's
      shares of the metrics.
    """
    executor = Pipeline if run.layout.pp > 1 else OneStage
    return executor(run, w, batch, zero, documents, share).gradients(grads)
