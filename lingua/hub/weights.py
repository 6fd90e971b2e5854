"""An encoder's weights under the names of ``transformers``' EuroBERT, Llama, Qwen2 and Qwen3, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lingua.errors import UserError
from lingua.hub.architectures import SHAPE, check_source, resolved, source_args
from lingua.transformer import Encoder, TransformerArgs

# Linear layers of a block as they are called there, and what TransformerArgs.biases calls them.
PARTS = {
    "self_attn.q_proj": "qkv", "self_attn.k_proj": "qkv", "self_attn.v_proj": "qkv", "self_attn.o_proj": "wo",
    "mlp.gate_proj": "ffn", "mlp.up_proj": "ffn", "mlp.down_proj": "ffn",
}  # fmt: skip


def to_transformers(encoder: Encoder, masked_lm: bool) -> dict[str, Tensor]:
    """The weights of the base model, or of the model with its output matrix; views of the encoder's own, and zeros.

    There, biases of attention come all together: those that the encoder lacks are zero.
    """
    args = resolved(encoder.args)
    sizes = [heads * args.head_dim for heads in (args.n_heads, args.n_kv_heads, args.n_kv_heads)]
    weights = {"embed_tokens.weight": encoder.embedding.weight, "norm.weight": encoder.norm.weight}
    for i, layer in enumerate(encoder.layers):
        block = f"layers.{i}"
        weights[f"{block}.input_layernorm.weight"] = layer.attention_norm.weight
        weights[f"{block}.post_attention_layernorm.weight"] = layer.ffn_norm.weight
        if layer.attention.qk_norm is not None:
            weights[f"{block}.self_attn.q_norm.weight"] = layer.attention.qk_norm.query.weight
            weights[f"{block}.self_attn.k_norm.weight"] = layer.attention.qk_norm.key.weight
        for kind in ("weight", "bias"):
            tensors = (
                *_parts(layer.attention.wqkv, kind, sizes),
                *_parts(layer.attention.wo, kind, [args.dim]),
                *_parts(layer.ffn.w13, kind, [args.ffn_dim] * 2),
                *_parts(layer.ffn.w2, kind, [args.dim]),
            )
            for name, tensor in zip(PARTS, tensors, strict=True):
                if tensor is not None:
                    weights[f"{block}.{name}.{kind}"] = tensor
                elif PARTS[name] != "ffn" and set(args.biases) & {"qkv", "wo"}:
                    weights[f"{block}.{name}.bias"] = torch.zeros(len(weights[f"{block}.{name}.weight"]))
    if masked_lm:
        weights = {f"model.{name}": weight for name, weight in weights.items()}
        if not args.tied:
            weights["lm_head.weight"] = encoder.output_VD
        if "ffn" in args.biases:  # which eurobert's output has then too
            weights["lm_head.bias"] = torch.zeros(args.vocab_size)
    return {name: weight.detach() for name, weight in weights.items()}


def _parts(linear: nn.Linear, kind: str, sizes: list[int]) -> Sequence[Tensor | None]:
    """Its weight or bias by output, or None for each."""
    tensor = getattr(linear, kind)
    return [None] * len(sizes) if tensor is None else tensor.split(sizes)


def read_source(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """``config.json`` and every tensor of a model folder. Raises UserError if a file is missing or unreadable."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = _read_json(folder / "config.json")
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.is_file():
        places = _read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise UserError(f"{index}: has no weight_map, which says in which file each tensor is")
        files = sorted(set(places.values()))
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
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected a JSON object, found {str(found)[:80]}")
    return found


def from_source(
    config: dict[str, Any], tensors: dict[str, Tensor], where: str, own: TransformerArgs | None = None
) -> tuple[Encoder, list[str]]:
    """An encoder with the weights of one of :data:`SOURCES`, and of its output matrix if that is not the embedding.

    Args:
        own: of an export of ours, what its encoder was; biases that came to it there, all zero, go again.

    Returns:
        the encoder, and the names of tensors that have no place in it.

    Raises:
        UserError: an architecture that ours does not cover, with the reason, or files that do not fit together.
    """
    check_source(config, where)
    left = {name.removeprefix("model."): tensor.float() for name, tensor in tensors.items()}
    head = left.get("lm_head.weight")
    if head is not None and "embed_tokens.weight" in left and torch.equal(head, left["embed_tokens.weight"]):
        head = None
        del left["lm_head.weight"]
    args = source_args(config, tied=head is None)
    if own is not None:
        for name in SHAPE:
            found, expected = getattr(resolved(args), name), getattr(resolved(own), name)
            if found != expected and not (name == "tied" and own.tied):
                raise UserError(
                    f"{where}: lingua.json says {name}={expected}, config.json {found}: they are not of one export"
                )
        args = own
    encoder = _build(args, left, where)
    if own is not None:
        left = {name: tensor for name, tensor in left.items() if not name.endswith(".bias") or tensor.any()}
    unknown = [name for name in left if name.startswith("layers.")]
    if unknown:
        raise UserError(f"{where}: {unknown[0]} has no counterpart here")
    return encoder.eval(), sorted(left)


def _build(args: TransformerArgs, left: dict[str, Tensor], where: str) -> Encoder:
    """An encoder of this shape, its weights taken out of ``left``."""
    shape = resolved(args)
    query, key = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    rows = {
        "self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key, "self_attn.o_proj": shape.dim,
        "mlp.gate_proj": shape.ffn_dim, "mlp.up_proj": shape.ffn_dim, "mlp.down_proj": shape.dim,
    }  # fmt: skip
    columns = {"self_attn.o_proj": query, "mlp.down_proj": shape.ffn_dim}

    def take(name: str, *expected: int) -> Tensor:
        if name not in left:
            raise UserError(f"{where}: has no tensor {name}, which its config.json promises")
        if left[name].shape != expected:
            raise UserError(f"{where}: {name} has shape {tuple(left[name].shape)}, its config.json means {expected}")
        return left.pop(name)

    state = {
        "embedding.weight": take("embed_tokens.weight", shape.vocab_size, shape.dim),
        "norm.weight": take("norm.weight", shape.dim),
    }
    if not args.tied:
        state["output.weight"] = take("lm_head.weight", shape.vocab_size, shape.dim)
    for i in range(args.n_layers):
        block, parts = f"layers.{i}", {}
        for name, layer in PARTS.items():
            parts[f"{name}.weight"] = take(f"{block}.{name}.weight", rows[name], columns.get(name, shape.dim))
            if layer in args.biases:
                parts[f"{name}.bias"] = take(f"{block}.{name}.bias", rows[name])
        for kind in ("weight", "bias"):
            q, k, v, o, gate, up, down = (parts.get(f"{name}.{kind}") for name in PARTS)
            joined = {
                "attention.wqkv": None if q is None else torch.cat((q, k, v)),
                "attention.wo": o,
                "ffn.w13": None if gate is None else torch.cat((gate, up)),
                "ffn.w2": down,
            }
            state |= {f"{block}.{name}.{kind}": tensor for name, tensor in joined.items() if tensor is not None}
        state[f"{block}.attention_norm.weight"] = take(f"{block}.input_layernorm.weight", shape.dim)
        state[f"{block}.ffn_norm.weight"] = take(f"{block}.post_attention_layernorm.weight", shape.dim)
        if args.qk_norm:
            for ours, theirs in (("query", "q_norm"), ("key", "k_norm")):
                norm = take(f"{block}.self_attn.{theirs}.weight", shape.head_dim)
                state[f"{block}.attention.qk_norm.{ours}.weight"] = norm
    with torch.device("meta"):
        encoder = Encoder(args)
    encoder.load_state_dict(state, assign=True)
    return encoder
