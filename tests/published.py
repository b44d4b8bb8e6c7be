"""Published decoders at tiny size as the `transformers` library builds them, with random values in every parameter."""

from __future__ import annotations

import torch
import transformers

VOCAB, T, D, H, KV, FF, L = 53, 24, 32, 4, 2, 48, 4
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = ROPE | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 2.0,
                 "original_max_position_embeddings": 12}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 2.0, "beta_fast": 2.0, "beta_slow": 0.01,
        "truncate": False, "original_max_position_embeddings": 12}  # fmt: skip
SIZES = {"vocab_size": VOCAB, "hidden_size": D, "intermediate_size": FF, "num_hidden_layers": L, "pad_token_id": None,
         "num_attention_heads": H, "num_key_value_heads": KV, "max_position_embeddings": T}  # fmt: skip
PLAIN = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
WITHOUT_FFN = {key: value for key, value in PLAIN.items() if key != "intermediate_size"}
FALCON, OPT = WITHOUT_FFN | {"ffn_hidden_size": FF}, WITHOUT_FFN | {"ffn_dim": FF}
GPT2 = {"vocab_size": VOCAB, "n_positions": T, "n_embd": D, "n_layer": 3, "n_head": H}
DECODERS: dict[str, tuple[str, dict]] = {
    "bloom": ("Bloom", {"vocab_size": VOCAB, "hidden_size": D, "n_layer": 3, "n_head": H, "seq_length": T}),
    "cohere": ("Cohere", SIZES | {"logit_scale": 0.25}),
    "cohere with a gain per head": ("Cohere", SIZES | {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": ("Cohere2", SIZES | {"sliding_window": 7, "head_dim": 10, "logit_scale": 0.25}),
    "falcon": ("Falcon", FALCON),
    "falcon 40b": ("Falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": KV, "bias": True}),
    "falcon rw": ("Falcon", FALCON | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "gemma": ("Gemma", SIZES | {"head_dim": 10}),
    "gemma2": ("Gemma2", SIZES | {"head_dim": 10, "query_pre_attn_scalar": 12, "sliding_window": 7,
                                  "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", SIZES | {"head_dim": 10, "query_pre_attn_scalar": 12, "sliding_window": 7,
                                      "num_hidden_layers": 6}),
    "gemma3 4b": ("Gemma3", SIZES | {"head_dim": 10, "query_pre_attn_scalar": 10, "sliding_window": 7,
                                         "num_hidden_layers": 6, "rope_parameters": {
                                             "full_attention": ROPE | {"rope_type": "linear", "factor": 8.0},
                                             "sliding_attention": ROPE | {"rope_theta": 100.0}}}),
    "gpt2": ("GPT2", GPT2),
    "gpt_neox": ("GPTNeoX", PLAIN | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}),
    "gpt_neox one after the other": ("GPTNeoX", PLAIN | {"use_parallel_residual": False}),
    "gpt_oss": ("GptOss", SIZES | {"head_dim": 16, "num_local_experts": 1, "num_experts_per_tok": 1,
                                   "rope_parameters": YARN, "sliding_window": 7, "swiglu_limit": 0.5}),
    "gptj": ("GPTJ", GPT2 | {"rotary_dim": 4}),
    "granite": ("Granite", SIZES | {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4,
                                    "attention_multiplier": 0.2}),
    "llama": ("Llama", SIZES | {"rope_parameters": ROPE}),
    "llama3": ("Llama", SIZES | {"rope_parameters": LLAMA3, "head_dim": 16, "tie_word_embeddings": True}),
    "llama with linear scaling": ("Llama", SIZES | {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}),
    "mistral": ("Mistral", SIZES | {"sliding_window": 5}),
    "mpt": ("Mpt", {"vocab_size": VOCAB, "max_seq_len": T, "d_model": D, "n_layers": 3, "n_heads": H,
                    "attn_config": {"clip_qkv": 0.3}}),
    "nemotron": ("Nemotron", SIZES | {"head_dim": 8}),
    "olmo": ("Olmo", SIZES | {"clip_qkv": 0.3}),
    "olmo2": ("Olmo2", SIZES | {"rope_parameters": ROPE | {"rope_theta": 500000.0}}),
    "olmo3": ("Olmo3", SIZES | {"sliding_window": 7}),
    "opt": ("OPT", OPT | {"word_embed_proj_dim": D}),
    "opt 350m": ("OPT", OPT | {"word_embed_proj_dim": 12, "do_layer_norm_before": False}),
    "phi": ("Phi", SIZES | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}),
    "phi with qk-norm": ("Phi", SIZES | {"qk_layernorm": True}),
    "phi3": ("Phi3", SIZES | {"sliding_window": 6}),
    "qwen2": ("Qwen2", SIZES),
    "qwen3": ("Qwen3", SIZES | {"head_dim": 10}),
    "smollm3": ("SmolLM3", SIZES),
    "stablelm": ("StableLm", SIZES | {"use_qkv_bias": True}),
    "stablelm 12b": ("StableLm", SIZES | {"use_parallel_residual": True, "qk_layernorm": True}),
    "starcoder": ("GPTBigCode", GPT2),
    "starcoder2": ("Starcoder2", SIZES | {"sliding_window": 6}),
    "xglm": ("XGLM", {"vocab_size": VOCAB, "max_position_embeddings": T, "d_model": D, "ffn_dim": FF, "num_layers": 3,
                      "attention_heads": H}),
}  # fmt: skip
"""By a name of ours: the library's class and its configuration."""


def library_model(name: str, **changes) -> torch.nn.Module:
    """The library's model. Values are large enough for any part to show in the logits, gains and biases included."""
    kind, values = DECODERS[name]
    model_class = getattr(transformers, f"{kind}ForCausalLM", None) or getattr(transformers, f"{kind}LMHeadModel")
    config = model_class.config_class(**values | changes)
    config._attn_implementation = "sdpa" if name == "falcon rw" else "eager"  # whose eager form adds ALiBi twice
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.1 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    return model


def tokens() -> torch.Tensor:
    """Two sequences at full context."""
    return torch.randint(0, VOCAB, (2, T), generator=torch.Generator().manual_seed(1))
