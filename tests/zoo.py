"""Tiny models of each family, random, made and saved by transformers, which is the reference."""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns of image processors that have nothing to do with this

import torch

SIZES = dict(vocab_size=259, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=128, bos_token_id=None, eos_token_id=None, attn_implementation="eager")
GPT2 = dict(vocab_size=259, n_positions=96, n_embd=48, n_layer=3, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None,
            eos_token_id=None, attn_implementation="eager")
LLAMA3 = dict(rope_type="llama3", rope_theta=8000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
LINEAR = dict(rope_type="linear", rope_theta=8000.0, factor=3.0)
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=2.0, original_max_position_embeddings=64, beta_fast=3.0, attention_factor=1.3)

# name -> (class of its configuration, what it is given)
ZOO = {
    "gpt2": ("GPT2", GPT2),
    "gpt2_untied": ("GPT2", {**GPT2, "tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 100, "layer_norm_epsilon": 1e-3}),
    "llama2": ("Llama", {**SIZES, "num_key_value_heads": 4}),
    "llama3": ("Llama", {**SIZES, "rope_parameters": LLAMA3, "rms_norm_eps": 1e-5}),
    "llama_linear": ("Llama", {**SIZES, "rope_parameters": LINEAR}),
    "llama_biases": ("Llama", {**SIZES, "attention_bias": True, "mlp_bias": True, "head_dim": 20}),
    "llama_attention_bias": ("Llama", {**SIZES, "attention_bias": True}),
    "smollm2": ("Llama", {**SIZES, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {**SIZES, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_untied": ("Qwen2", SIZES),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 20, "tie_word_embeddings": True}),
    "qwen3_yarn": ("Qwen3", {**SIZES, "head_dim": 20, "rope_parameters": YARN}),
    "qwen3_untied": ("Qwen3", {**SIZES, "head_dim": 20, "attention_bias": True}),
}


def make(name):
    """The random model of a name: no bias at 0, no norm at 1, where mistakes would hide."""
    import transformers

    kind, settings = ZOO[name]
    torch.manual_seed(0)
    with torch.no_grad():
        model = getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**settings))
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model.eval()


def greedy(model, tokens, count):
    """What transformers generates after tokens (B, T): (B, count)."""
    return model.generate(tokens, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(tokens), pad_token_id=0,
                          eos_token_id=None)[:, tokens.size(1):]
