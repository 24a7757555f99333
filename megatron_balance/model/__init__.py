"""The model as a pipeline split sees it: the chain embedding, layers, head.

``spec`` says what a model is, ``kinds`` what its layers can be, ``arguments`` reads both from Megatron's argument names, with
``hybrid`` for layer patterns of Mamba models and ``heterogeneous`` for layers with a configuration of their own.
"""

from megatron_balance.model.arguments import hybrid_pattern, layer_kinds, refuse_uncovered
from megatron_balance.model.hybrid import HybridPattern
from megatron_balance.model.kinds import Experts, LatentAttention, LayerKind, Mamba, Recompute
from megatron_balance.model.spec import DTYPE_BYTES, ModelSpec

__all__ = [
    "DTYPE_BYTES",
    "Experts",
    "HybridPattern",
    "LatentAttention",
    "LayerKind",
    "Mamba",
    "ModelSpec",
    "Recompute",
    "hybrid_pattern",
    "layer_kinds",
    "refuse_uncovered",
]
