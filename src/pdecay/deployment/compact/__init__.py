"""Removal of dead units: a smaller model that computes the same function.

**Unit.** The smallest part of a model that can be removed as a whole: a neuron, a channel, an
attention head, an embedding dimension. A unit is one position (or several) along some axes of
several tensors. A hidden neuron is a row of one weight, an element of its bias, and a column of the
next weight. The *producer* of a unit is the layer that computes it; a *consumer* is an operation
that sums over the unit's axis, usually the next layer.

**Dead unit.** A unit that can be removed without changing the model's outputs, because

- it is unread: all its weights in all consumers are zero, or the results are not used;
- it is zero for every input;
- it is constant for every input. Then each consumer's sum changes by a constant, which is added to
  the consumer's bias. This is called *folding*.

**Proof.** The model runs once on an example. Its PyTorch operations are recorded (`trace`). Each
kind of operation has a rule (`rules`) that says which positions of its tensors must be removed
together (`units`), which elements of its outputs vary with the model's inputs, and which elements
of its inputs the model's outputs depend on (`analysis`). Only the values of parameters and
constants enter, never the values of the example. A unit is removed if it is dead for every
consumer (`removal`). Operations without a rule keep every unit that they touch.

**Check.** The positions are cut out of a copy of the model (`shrink`). The copy runs on the example
and its operations are compared with the expected ones; attributes that hold an old size are
updated, and units whose removal the code cannot follow are kept (`fitting`). At the end the outputs
of both models are compared on the example and on random inputs (`compaction`).

Dead units that are kept are listed in the report with the reason (`report`). `attention` replaces
``nn.MultiheadAttention``, which cannot lose heads. `optimizer` carries an optimizer's state over.
"""

from pdecay.deployment.compact.compaction import compact
from pdecay.deployment.compact.report import CompactReport, KeptUnits, SmallerTensor
from pdecay.deployment.model.errors import CompactError

__all__ = ["CompactError", "CompactReport", "KeptUnits", "SmallerTensor", "compact"]
