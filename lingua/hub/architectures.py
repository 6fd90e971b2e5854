"""Which architectures of ``transformers`` an encoder is exported as and imported from, and their ``config.json``."""

from __future__ import annotations

import dataclasses
from typing import Any

from lingua.errors import UserError
from lingua.rotary import RopeScaling
from lingua.transformer import TransformerArgs, ffn_width

SOURCES = ("eurobert", "llama", "qwen2", "qwen3")  # architectures that can be imported
NEEDED = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size", "rms_norm_eps",
)  # fmt: skip
# Fields of a model's config that an export keeps, or that change nothing of what a trained encoder computes.
EXPRESSED = {
    "dim", "n_layers", "n_heads", "ffn_dim", "n_kv_heads", "head_dim", "vocab_size", "rope_theta", "rope_scaling",
    "norm_eps", "biases", "tied", "qk_norm", "init_std", "init_truncate", "init_residual", "attention", "predictor",
    "z_loss",
}  # fmt: skip
SHAPE = (
    "dim", "n_layers", "n_heads", "ffn_dim", "n_kv_heads", "head_dim", "vocab_size", "rope_theta", "rope_scaling",
    "norm_eps", "qk_norm", "tied",
)  # fmt: skip


def resolved(args: TransformerArgs) -> TransformerArgs:
    """The same shape with every -1 spelt out, and with one name for rotary positions that are not scaled."""
    return dataclasses.replace(
        args,
        ffn_dim=ffn_width(args.dim) if args.ffn_dim == -1 else args.ffn_dim,
        n_kv_heads=args.n_heads if args.n_kv_heads == -1 else args.n_kv_heads,
        head_dim=args.head_size,
        rope_scaling=args.rope_scaling if args.rope_scaling.is_on else RopeScaling(),
    )


def architecture(args: TransformerArgs, where: str) -> str:
    """What an encoder is exported as: ``eurobert``, or ``qwen3`` (without its causal mask) if it has QK-norm.

    Raises:
        UserError: no architecture of ``transformers`` has all that this one has.
    """
    if args.qk_norm and "ffn" in args.biases:
        raise UserError(
            f"{where}: model.qk_norm=True with model.biases={args.biases} cannot be exported: of the architectures of "
            "transformers, eurobert has no QK-norm and qwen3 no biases in feed-forward layers"
        )
    if not args.qk_norm and args.dim % args.n_heads:
        raise UserError(
            f"{where}: model.dim={args.dim} with model.n_heads={args.n_heads} cannot be exported: the eurobert "
            "architecture of transformers wants a multiple"
        )
    return "qwen3" if args.qk_norm else "eurobert"


def transformers_config(
    args: TransformerArgs, kind: str, positions: int, ids: dict[str, int], masked_lm: bool
) -> dict[str, Any]:
    """The ``config.json`` of an encoder.

    Args:
        kind: its :func:`architecture`.
        positions: the longest row it was trained on.
        ids: of the special tokens, ``bos``, ``pad``, ``eos`` and ``mask``.
        masked_lm: it predicts masked tokens, through its embedding if that is tied.
    """
    args = resolved(args)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": args.rope_theta}
    if args.rope_scaling.is_on:
        rope |= {"rope_type": "llama3", **dataclasses.asdict(args.rope_scaling)}
    heads = {"eurobert": ("EuroBertModel", "EuroBertForMaskedLM"), "qwen3": ("Qwen3Model", "Qwen3ForCausalLM")}
    own = {
        "eurobert": {"mlp_bias": "ffn" in args.biases, "classifier_pooling": "mean"},
        "qwen3": {"is_causal": False, "use_sliding_window": False},
    }
    return {
        "architectures": [heads[kind][masked_lm]],
        "model_type": kind,
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "intermediate_size": args.ffn_dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "initializer_range": args.init_std,
        "rms_norm_eps": args.norm_eps,
        "rope_parameters": rope,
        "attention_bias": bool(set(args.biases) & {"qkv", "wo"}),
        "attention_dropout": 0.0,
        # Untied, a CrossBERT asked for masked language modelling gets a new head and a warning: it has none here.
        "tie_word_embeddings": masked_lm and args.tied,
        **own[kind],
        **{f"{role}_token_id": ids[role] for role in ("bos", "pad", "eos", "mask")},
        "dtype": "float32",
    }


def check_source(config: dict[str, Any], where: str) -> None:
    """Raise UserError if a model's config asks for what our encoder does not compute."""
    kind = config.get("model_type")
    if kind not in SOURCES:
        known = f"{', '.join(SOURCES[:-1])} and {SOURCES[-1]}"
        raise UserError(f"{where}: model_type={kind}: only {known} have the encoder's architecture")
    missing = [name for name in NEEDED if not isinstance(config.get(name), int | float)]
    if missing:
        raise UserError(f"{where}: config.json has no number for {missing[0]}")
    slides = config.get("sliding_window") and config.get("use_sliding_window", True)
    reasons = {
        "hidden_act": (config.get("hidden_act", "silu") == "silu", "the feed-forward layers here are SwiGLU"),
        "sliding_window": (not slides, "attention here sees the whole row"),
    }
    for name, (fits, reason) in reasons.items():
        if not fits:
            raise UserError(f"{where}: {name}={config[name]} cannot be imported: {reason}")
    try:
        _rope_scaling(config)
    except UserError as error:
        key = _rope_key(config)
        raise UserError(f"{where}: {key}={config[key]} cannot be imported: {error}") from None


def _rope_key(config: dict[str, Any]) -> str:
    """Where it says how rotary positions are scaled: older versions of ``transformers`` had another name for it."""
    return "rope_scaling" if config.get("rope_scaling") else "rope_parameters"


def _rope_scaling(config: dict[str, Any]) -> RopeScaling:
    """Raises UserError if there is no such scaling here, or a value is missing or impossible."""
    rope = config.get(_rope_key(config)) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeScaling()
    if kind != "llama3":
        raise UserError(f"rope_type={kind} is not computed here: rotary positions are scaled as llama3 or not at all")
    for name in RopeScaling.__dataclass_fields__:
        if not isinstance(rope.get(name), int | float):
            raise UserError(f"it has no number for {name}")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )


def is_causal(config: dict[str, Any]) -> bool:
    """Whether a model was trained to predict each next token."""
    return config["model_type"] != "eurobert" and config.get("is_causal", True)


def source_args(config: dict[str, Any], tied: bool) -> TransformerArgs:
    """The shape that a ``config.json`` describes. Raises UserError if it is impossible."""
    kind, rope = config["model_type"], config.get(_rope_key(config)) or {}
    biases = []
    if config.get("attention_bias") or kind == "qwen2":  # Qwen2 always has three of the four
        biases = ["qkv"] if kind == "qwen2" else ["qkv", "wo"]
    if config.get("mlp_bias"):
        biases.append("ffn")
    dim, n_heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or (128 if kind == "qwen3" else -1)
    args = TransformerArgs(
        dim=dim,
        n_layers=config["num_hidden_layers"],
        n_heads=n_heads,
        ffn_dim=config["intermediate_size"],
        n_kv_heads=config.get("num_key_value_heads") or -1,
        head_dim=-1 if head_dim * n_heads == dim else head_dim,
        vocab_size=config["vocab_size"],
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        rope_scaling=_rope_scaling(config),
        norm_eps=config["rms_norm_eps"],
        init_std=config.get("initializer_range", 0.02),
        biases=biases,
        tied=tied,
        qk_norm=kind == "qwen3",
    )
    if args.ffn_dim == ffn_width(args.dim):
        args.ffn_dim = -1
    if args.n_kv_heads == args.n_heads:
        args.n_kv_heads = -1
    return args
