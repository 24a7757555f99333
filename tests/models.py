"""Models that people train, as Megatron's arguments by name, from their published configurations."""

from __future__ import annotations

from typing import Any

_LLAMA = {
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "group_query_attention": True,
    "bf16": True,
}
_WITHOUT_GROUPS = {"group_query_attention": False}

MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        **_LLAMA, "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32,
        "num_query_groups": 8, "kv_channels": 128, "padded_vocab_size": 128256, "seq_length": 8192,
    },
    "llama-3.1-405b": {
        **_LLAMA, "num_layers": 126, "hidden_size": 16384, "ffn_hidden_size": 53248, "num_attention_heads": 128,
        "num_query_groups": 8, "kv_channels": 128, "padded_vocab_size": 128256, "seq_length": 8192,
    },
    "llama-2-7b": {
        **_LLAMA, **_WITHOUT_GROUPS, "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 11008,
        "num_attention_heads": 32, "kv_channels": 128, "padded_vocab_size": 32000, "seq_length": 4096,
    },
    "qwen2.5-7b": {
        **_LLAMA, "num_layers": 28, "hidden_size": 3584, "ffn_hidden_size": 18944, "num_attention_heads": 28,
        "num_query_groups": 4, "kv_channels": 128, "padded_vocab_size": 152064, "seq_length": 4096,
        "add_qkv_bias": True,
    },
    "qwen3-30b-a3b": {
        **_LLAMA, "num_layers": 48, "hidden_size": 2048, "ffn_hidden_size": 6144, "num_attention_heads": 32,
        "num_query_groups": 4, "kv_channels": 128, "padded_vocab_size": 151936, "seq_length": 4096,
        "qk_layernorm": True, "num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768,
    },
    # GELU in place of SiLU, which Megatron's flags cannot say: the same matrices. Every other layer has a window.
    "gemma-2-9b": {
        **_LLAMA, "num_layers": 42, "hidden_size": 3584, "ffn_hidden_size": 14336, "num_attention_heads": 16,
        "num_query_groups": 8, "kv_channels": 256, "padded_vocab_size": 256000, "seq_length": 8192,
        "untie_embeddings_and_output_weights": False, "window_size": (4095, 0), "window_attn_skip_freq": 2,
    },
    "mixtral-8x7b": {
        **_LLAMA, "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32,
        "num_query_groups": 8, "kv_channels": 128, "padded_vocab_size": 32000, "seq_length": 4096,
        "num_experts": 8, "moe_router_topk": 2,
    },
    "deepseek-v3": {
        **_LLAMA, **_WITHOUT_GROUPS, "num_layers": 61, "hidden_size": 7168, "ffn_hidden_size": 18432,
        "num_attention_heads": 128, "kv_channels": 128, "padded_vocab_size": 129280, "seq_length": 4096,
        "qk_layernorm": True, "multi_latent_attention": True, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "num_experts": 256, "moe_router_topk": 8,
        "moe_ffn_hidden_size": 2048, "moe_shared_expert_intermediate_size": 2048,
        "moe_layer_freq": [0] * 3 + [1] * 58, "mtp_num_layers": 1,
    },
    "gpt-oss-120b": {
        **_LLAMA, "num_layers": 36, "hidden_size": 2880, "ffn_hidden_size": 2880, "num_attention_heads": 64,
        "num_query_groups": 8, "kv_channels": 64, "padded_vocab_size": 201088, "seq_length": 4096,
        "swiglu": False, "quick_geglu": True, "add_bias_linear": True, "softmax_type": "learnable",
        "num_experts": 128, "moe_router_topk": 4, "moe_ffn_hidden_size": 2880,
        "window_size": (127, 0), "window_attn_skip_freq": 2,
    },
    "nemotron-h-8b": {
        **_LLAMA, "num_layers": 52, "hidden_size": 4096, "ffn_hidden_size": 21504, "num_attention_heads": 32,
        "num_query_groups": 8, "kv_channels": 128, "padded_vocab_size": 131072, "seq_length": 8192,
        "swiglu": False, "squared_relu": True, "position_embedding_type": "none",
        "mamba_state_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "mamba_num_groups": 8,
        "hybrid_layer_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    },
    "nemotron-3-nano-30b-a3b": {
        **_LLAMA, "num_layers": 52, "hidden_size": 2688, "ffn_hidden_size": 1856, "num_attention_heads": 32,
        "num_query_groups": 2, "kv_channels": 128, "padded_vocab_size": 131072, "seq_length": 8192,
        "swiglu": False, "squared_relu": True, "position_embedding_type": "none",
        "mamba_state_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "mamba_num_groups": 8,
        "num_experts": 128, "moe_router_topk": 6, "moe_ffn_hidden_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "hybrid_layer_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    },
}  # fmt: skip
