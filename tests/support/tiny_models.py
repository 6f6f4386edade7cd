"""Tiny Hugging Face models of every family with a pipeline plan."""

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

# Each configuration uses the entries that its family has.
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": 8,
    "output_router_logits": True,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROTARY = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
# Settings that the default or the tiny configuration of a family needs to make a model.
OF_FAMILY: dict[str, dict[str, object]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROTARY}},
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    # Its parts for sound and images are not used, but built.
    "phi4_multimodal": {
        "audio_config": {"num_blocks": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
        | {"nemo_conv_channels": 32, "ext_pw_out_channel": 32},
        "vision_config": {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
    },
    "longcat_flash": {"num_hidden_layers": 8},  # each of its layers counts as two
}
LATENT_ATTENTION = {"num_key_value_heads": 4, "head_dim": 4}


def families() -> dict[str, type[PretrainedConfig]]:
    """Return the configurations of causal models with a pipeline plan, by family."""
    found = {c.model_type: c for c in MODEL_FOR_CAUSAL_LM_MAPPING if getattr(c, "base_model_pp_plan", None)}
    return dict(sorted(found.items()))


def tiny(family: str, **settings: object) -> PretrainedConfig:
    """Return a configuration with four layers of width 32 and 96 tokens."""
    config = families()[family]
    whole = config()
    sizes = {name: size for name, size in SIZES.items() if name in dir(whole)}
    if "kv_lora_rank" in sizes:
        sizes |= LATENT_ATTENTION
    return config(**{**sizes, **OF_FAMILY.get(family, {}), **settings})


def token_ids(count: int = 1, seed: int = 0) -> torch.Tensor:
    """Return sequences of 16 tokens, two for each of ``count`` micro-batches."""
    return torch.randint(3, 96, (2 * count, 16), generator=torch.Generator().manual_seed(seed))
