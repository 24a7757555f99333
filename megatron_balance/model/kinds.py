"""What layers can be, and the settings of their parts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerKind:
    """What can make one layer cost something else than its neighbour.

    A layer mixes tokens and feeds each forward. A transformer layer does both; layers of hybrid models do one, and layers
    with a configuration of their own may lack either.

    Attributes:
        moe: its feed-forward part is a mixture of experts.
        window: earlier keys that a query attends to at most (sliding-window attention); None is all of them.
        mixer: what mixes tokens: ``attention``, ``mamba``, ``linear`` (one matrix in attention's place) or None.
        feed_forward: ``mlp``, ``linear`` (one matrix in its place) or None.
        num_query_groups: key and value heads, where they are not the model's.
        ffn_hidden_size: width of its MLP, where it is not the model's.
    """

    moe: bool = False
    window: int | None = None
    mixer: str | None = "attention"
    feed_forward: str | None = "mlp"
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None

    def __str__(self) -> str:
        """A lasting name, the key in costs files: ``dense``, ``moe/4096`` (window), ``mamba``, ``attention:8+mlp:14336``."""
        own_width = self.num_query_groups or self.ffn_hidden_size
        if (self.mixer, self.feed_forward) == ("attention", "mlp") and not own_width:
            return ("moe" if self.moe else "dense") + self._window_name
        return "+".join(filter(None, (self._mixer_name, self._feed_forward_name))) or "empty"

    @property
    def _window_name(self) -> str:
        return f"/{self.window}" if self.window else ""

    @property
    def _mixer_name(self) -> str | None:
        if self.mixer != "attention":
            return self.mixer
        return "attention" + (f":{self.num_query_groups}" if self.num_query_groups else "") + self._window_name

    @property
    def _feed_forward_name(self) -> str | None:
        if self.feed_forward != "mlp":
            return self.feed_forward
        if self.moe:
            return "experts"
        return "mlp" + (f":{self.ffn_hidden_size}" if self.ffn_hidden_size else "")


@dataclass(frozen=True)
class Experts:
    """The mixture of experts of the layers that have one.

    Attributes:
        count: routed experts.
        topk: experts that each token visits.
        ffn_hidden_size: width of one expert.
        shared_ffn_hidden_size: width of the shared experts together; 0 without any.
        shards: ranks over which the routed experts' weights are spread (expert parallel size times expert tensor
            parallel size).
        tensor_shards: ranks over which each of them is spread (expert tensor parallel size).
        shared_gate: a learned gate scales what the shared experts add.
        latent_size: width to which tokens are projected before they visit the routed experts, and back from after it;
            None is the hidden size, without projections.
    """

    count: int
    topk: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    shards: int = 1
    tensor_shards: int = 1
    shared_gate: bool = False
    latent_size: int | None = None


@dataclass(frozen=True)
class LatentAttention:
    """Multi-latent attention (MLA, arXiv 2405.04434), in Megatron's words.

    Attributes:
        q_lora_rank: width of the latent queries; None projects queries straight from the residual stream.
        kv_lora_rank: width of the latent keys and values.
        qk_head_dim, qk_pos_emb_head_dim: of one head's query and key, the parts without and with a rotary position
            embedding; the latter part of the key is shared by all heads.
        v_head_dim: width of one head's value.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int

    @property
    def head_dim(self) -> int:
        """Width of one head's query or key."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


@dataclass(frozen=True)
class Mamba:
    """The Mamba-2 layers of a hybrid model.

    Attributes:
        num_heads, head_dim: heads of the state-space model, and the width of one.
        state_dim: width of the state of each channel.
        num_groups: groups of heads that share their input and output matrices (B and C).
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int

    @property
    def inner_size(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def convolved_size(self) -> int:
        """Channels that pass the convolution: all heads' and their input and output matrices'."""
        return self.inner_size + 2 * self.num_groups * self.state_dim

    @property
    def projected_size(self) -> int:
        """Outputs of the input projection: what is convolved, a gate for each channel, a time step for each head."""
        return self.convolved_size + self.inner_size + self.num_heads


@dataclass(frozen=True)
class Recompute:
    """Megatron's activation recomputation, in the words of its flags; ``granularity`` None is none at all."""

    granularity: str | None = None
    method: str | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ()

    def full_share(self, num_layers: int, num_stages: int) -> float:
        """Share of the layers that are computed again as a whole.

        The method ``block`` recomputes so many layers of every stage. Which ones depends on the split, so each layer
        carries its share.
        """
        if self.granularity != "full":
            return 0.0
        if self.method != "block":
            return 1.0
        return min(1.0, self.num_layers * num_stages / num_layers)
