"""An encoder's weights under the names of ``transformers``' EuroBERT and Llama, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lingua.errors import UserError
from lingua.transformer import Encoder, TransformerArgs, ffn_width

# Fields of a model's config that eurobert can express, or that change nothing of what a trained encoder computes.
EXPRESSED = {
    "dim", "n_layers", "n_heads", "ffn_dim", "vocab_size", "rope_theta", "norm_eps",
    "init_std", "init_truncate", "init_residual", "attention", "predictor", "z_loss",
}  # fmt: skip
NEUTRAL = {"qk_norm": False}  # fields that eurobert can express at this value only
SOURCES = ("eurobert", "llama")  # architectures that can be imported
NEEDED = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size", "rms_norm_eps",
)  # fmt: skip


def to_eurobert(encoder: Encoder) -> dict[str, Tensor]:
    """The weights of ``EuroBertModel``, views of the encoder's own."""
    weights = {"embed_tokens.weight": encoder.embedding.weight, "norm.weight": encoder.norm.weight}
    for i, layer in enumerate(encoder.layers):
        query, key, value = layer.attention.wqkv.weight.chunk(3)
        gate, up = layer.ffn.w13.weight.chunk(2)
        parts = {
            "self_attn.q_proj": query,
            "self_attn.k_proj": key,
            "self_attn.v_proj": value,
            "self_attn.o_proj": layer.attention.wo.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.ffn.w2.weight,
            "input_layernorm": layer.attention_norm.weight,
            "post_attention_layernorm": layer.ffn_norm.weight,
        }
        weights |= {f"layers.{i}.{name}.weight": weight for name, weight in parts.items()}
    return {name: weight.detach() for name, weight in weights.items()}


def eurobert_config(args: TransformerArgs, positions: int, ids: dict[str, int], masked_lm: bool) -> dict[str, Any]:
    """The ``config.json`` of an encoder.

    Args:
        positions: the longest row it was trained on.
        ids: of the special tokens, ``bos``, ``pad``, ``eos`` and ``mask``.
        masked_lm: the embedding is also the output matrix of masked language modelling.
    """
    return {
        "architectures": ["EuroBertForMaskedLM" if masked_lm else "EuroBertModel"],
        "model_type": "eurobert",
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "intermediate_size": ffn_width(args.dim) if args.ffn_dim == -1 else args.ffn_dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_heads,
        "head_dim": args.dim // args.n_heads,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "initializer_range": args.init_std,
        "rms_norm_eps": args.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": args.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        # Untied, a CrossBERT asked for masked language modelling gets a new head and a warning: it has none here.
        "tie_word_embeddings": masked_lm,
        "classifier_pooling": "mean",
        **{f"{role}_token_id": ids[role] for role in ("bos", "pad", "eos", "mask")},
        "dtype": "float32",
    }


def read_source(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """``config.json`` and every tensor of a model folder. Raises UserError if a file is missing or unreadable."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = _read_json(folder / "config.json")
    index = folder / "model.safetensors.index.json"
    files = sorted(set(_read_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    tensors: dict[str, Tensor] = {}
    for name in files:
        if not (folder / name).is_file():
            other = [path.name for path in folder.glob("*.bin")]
            hint = f"; {other[0]} is a pickle: convert it to safetensors first" if other else ""
            raise UserError(f"{folder}: has no {name}{hint}")
        try:
            tensors |= load_file(folder / name)
        except SafetensorError as error:
            raise UserError(f"{folder / name}: not a whole safetensors file: {error}") from None
    return config, tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"{path.parent}: has no {path.name}; expected a model folder as transformers writes it"
        ) from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    return found


def check_source(config: dict[str, Any], where: str) -> None:
    """Raise UserError if a model's config asks for what our encoder does not compute."""
    kind = config.get("model_type")
    if kind not in SOURCES:
        raise UserError(f"{where}: model_type={kind}: only {' and '.join(SOURCES)} have the encoder's architecture")
    missing = [name for name in NEEDED if not isinstance(config.get(name), int | float)]
    if missing:
        raise UserError(f"{where}: config.json has no number for {missing[0]}")
    dim, heads = config["hidden_size"], config["num_attention_heads"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    reasons = {
        "hidden_act": (config.get("hidden_act", "silu") == "silu", "the feed-forward layers here are SwiGLU"),
        "attention_bias": (not config.get("attention_bias"), "attention here has no biases"),
        "mlp_bias": (not config.get("mlp_bias"), "feed-forward layers here have no biases"),
        "rope_parameters": (
            rope.get("rope_type", rope.get("type", "default")) == "default",
            "rotary positions are not scaled here",
        ),
        "head_dim": (config.get("head_dim") in (None, dim // heads), f"heads here are hidden_size / {heads} wide"),
        "sliding_window": (not config.get("sliding_window"), "attention here sees the whole row"),
    }
    for name, (fits, reason) in reasons.items():
        if not fits:
            raise UserError(f"{where}: {name}={config.get(name, rope)} cannot be imported: {reason}")


def from_source(config: dict[str, Any], tensors: dict[str, Tensor], where: str) -> tuple[Encoder, list[str]]:
    """An encoder with the weights of a EuroBERT or a Llama.

    Queries that share keys and values get copies of their own. A Llama's attention becomes bidirectional.

    Returns:
        the encoder, and the names of tensors that have no place in it (an output matrix of its own).

    Raises:
        UserError: an architecture that ours does not cover, with the reason.
    """
    check_source(config, where)
    rope = config.get("rope_parameters") or {}
    args = TransformerArgs(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        ffn_dim=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        norm_eps=config["rms_norm_eps"],
        init_std=config.get("initializer_range", 0.02),
    )
    if args.ffn_dim == ffn_width(args.dim):
        args.ffn_dim = -1
    left = {name.removeprefix("model."): tensor.float() for name, tensor in tensors.items()}
    shared = config.get("num_key_value_heads") or args.n_heads  # heads of keys and values

    def take(name: str) -> Tensor:
        try:
            return left.pop(name)
        except KeyError:
            raise UserError(f"{where}: has no tensor {name}, which its config.json promises") from None

    def for_each_head(name: str) -> Tensor:
        weight, head_dim = take(name), args.dim // args.n_heads
        if weight.shape != (shared * head_dim, args.dim):
            found, expected = tuple(weight.shape), (shared * head_dim, args.dim)
            raise UserError(f"{where}: {name} has shape {found}, its config.json means {expected}")
        return weight.unflatten(0, (shared, head_dim)).repeat_interleave(args.n_heads // shared, dim=0).flatten(0, 1)

    state = {"embedding.weight": take("embed_tokens.weight"), "norm.weight": take("norm.weight")}
    for i in range(args.n_layers):
        block = f"layers.{i}"
        query = take(f"{block}.self_attn.q_proj.weight")
        key, value = (for_each_head(f"{block}.self_attn.{part}_proj.weight") for part in "kv")
        gate, up = take(f"{block}.mlp.gate_proj.weight"), take(f"{block}.mlp.up_proj.weight")
        state |= {
            f"{block}.attention.wqkv.weight": torch.cat((query, key, value)),
            f"{block}.attention.wo.weight": take(f"{block}.self_attn.o_proj.weight"),
            f"{block}.ffn.w13.weight": torch.cat((gate, up)),
            f"{block}.ffn.w2.weight": take(f"{block}.mlp.down_proj.weight"),
            f"{block}.attention_norm.weight": take(f"{block}.input_layernorm.weight"),
            f"{block}.ffn_norm.weight": take(f"{block}.post_attention_layernorm.weight"),
        }
    unknown = [name for name in left if name.startswith("layers.")]
    if unknown:
        raise UserError(f"{where}: {unknown[0]} has no counterpart here (biases and norms of queries do not)")
    with torch.device("meta"):
        encoder = Encoder(args)
    for name, parameter in encoder.state_dict().items():
        if state[name].shape != parameter.shape:
            found, expected = tuple(state[name].shape), tuple(parameter.shape)
            raise UserError(f"{where}: the weights of {name} have shape {found}, its config.json means {expected}")
    encoder.load_state_dict(state, assign=True)
    head = left.get("lm_head.weight")
    if head is not None and torch.equal(head, state["embedding.weight"]):
        del left["lm_head.weight"]
    return encoder.eval(), sorted(left)
