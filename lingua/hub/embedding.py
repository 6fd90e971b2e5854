"""An embedding model of ``apps.embed`` as a folder of sentence-transformers: encoder, pooler, prompts, lengths."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from lingua import checkpoint
from lingua.embedder import TextEmbedder, load_embedder
from lingua.errors import UserError
from lingua.features import TextEncoder
from lingua.hf_encoder import HFEncoder
from lingua.hub.architectures import architecture
from lingua.hub.card import PAPER
from lingua.hub.export import (
    STOCK,
    ExportArgs,
    check_expressed,
    longest_row,
    pooling_config,
    push,
    whole_or_not,
    write_encoder,
    write_pipeline,
    write_weights,
)
from lingua.hub.vocabulary import to_library
from lingua.pooler import Pooler
from lingua.rotary import rotary_frequencies

MODULE = Path(__file__).with_name("pooler_module.py")
CODE = "crossattention_pooler.py"  # the copy of it that a folder brings


def export_embedder(args: ExportArgs, folder: Path) -> None:
    """Write the folder, and push it if asked: :func:`lingua.hub.export.export` of an embedding model's checkpoint.

    Raises:
        UserError: a pooler or an encoder that cannot be expressed.
    """
    to = Path(args.to)
    with checkpoint.in_use(folder):
        model = cast("TextEmbedder", load_embedder(args.ckpt, device="cpu"))  # that of every checkpoint
    module = pooling_module(model.model.pooler, str(folder))
    with whole_or_not(to) as partial:
        _write_encoder(partial, model, str(folder))
        _write_modules(partial, model, module)
        name = args.name or to.resolve().name
        (partial / "README.md").write_text(_card(name, args.license, model))
    print(f"{to}: written; {_loading(str(to), model)} loads it")
    if module is not None:
        print(
            f"trust_remote_code=True is needed because sentence-transformers has no pooler of cross-attention: the "
            f"folder brings its own, {CODE}, which loading runs. It is a copy of {MODULE.name} of this library"
        )
    for line in _differences(model):
        print(line)
    if args.push is not None:
        push(to, args.push, args.private)


def pooling_module(pooler: Pooler, where: str) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Config and weights of the exported cross-attention pooler, or None where the library's own pooling does.

    Raises:
        UserError: a pooler that reads more than the encoder's last state, or whose queries see each other.
    """
    predictor = pooler.predictor
    if predictor is None:
        return None
    block = predictor.layers[0]
    refused = {"mix_layers": predictor.mix is not None, "self_attention": block.self_attention is not None}
    for name, is_on in refused.items():
        if is_on:
            raise UserError(
                f"{where}: its pooler has model.predictor.{name}=true, which cannot be exported: sentence-transformers "
                "hands the encoder's last state to a pooler whose queries do not see each other"
            )
    state = predictor.state_dict()
    config = {
        "dim": state["mask_vector"].shape[1],
        "source_dim": block.attention.wkv.in_features,
        "n_layers": len(predictor.layers),
        "n_heads": block.attention.n_heads,
        "ffn_dim": block.ffn.w2.in_features,
        "n_queries": len(state["mask_vector"]),
        "position": pooler.args.position,
        "rope_theta": predictor.rope_theta,
        "norm_eps": predictor.norm.eps,
        "qk_norm": block.attention.qk_norm is not None,
    }
    if predictor.rope_scaling.is_on:
        frequencies_P = rotary_frequencies(predictor.head_dim, predictor.rope_theta, predictor.rope_scaling)
        config["frequencies"] = frequencies_P.tolist()
    renamed = {"qk_norm.query": "query_norm", "qk_norm.key": "key_norm", "attention.": "", "ffn.": ""}
    weights = {}
    for name, value in state.items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        weights[name.replace("mask_vector", "queries_QD")] = value
    return config, weights


def _write_encoder(to: Path, model: TextEmbedder, where: str) -> None:
    if isinstance(model.encoder, HFEncoder):
        model.encoder.model.save_pretrained(to)
        model.encoder.tokenizer.save_pretrained(to)
        return
    encoder = cast("TextEncoder", model.encoder)
    check_expressed(encoder.config["model"], "clm" if encoder.causal else None, where)
    kind = architecture(encoder.encoder.args, where)
    longest = max(longest_row(encoder.config["data"]), *_lengths(model).values())
    library = to_library(encoder.tokenizer)
    write_encoder(to, kind, encoder.encoder, encoder.tokenizer, library, longest, masked_lm=False)


def _write_modules(to: Path, model: TextEmbedder, module: tuple[dict[str, Any], dict[str, Tensor]] | None) -> None:
    normalize = ("2_Normalize", STOCK + "Normalize", None)
    prompts = {role: model.prompts.get(role, "") for role in _lengths(model)}
    prompts["document"] = prompts["passage"]  # the name that encode_document looks for, and has an empty one of
    longest = max(_lengths(model).values())
    if module is None:
        pooling = ("1_Pooling", STOCK + "Pooling", pooling_config(model.dim, model.model.pooler.args.kind))
        write_pipeline(to, [pooling, normalize], longest, prompts)
        return
    config, weights = module
    path = "1_CrossAttentionPooler"
    pooler = (path, f"{Path(CODE).stem}.CrossAttentionPooler", config)
    write_pipeline(to, [pooler, normalize], longest, prompts)
    write_weights(to / path / "model.safetensors", weights)
    shutil.copyfile(MODULE, to / CODE)


def _lengths(model: TextEmbedder) -> dict[str, int]:
    """Most tokens by role."""
    return {role: model.max_lengths.get(role, model.max_length) for role in ("query", "passage")}


def _loading(name: str, model: TextEmbedder) -> str:
    trust = "" if model.model.pooler.predictor is None else ", trust_remote_code=True"
    return f"SentenceTransformer({name!r}{trust})"


def _differences(model: TextEmbedder) -> list[str]:
    lengths = _lengths(model)
    if len(set(lengths.values())) == 1:
        return []
    return [
        f"sentence-transformers has one length for all texts: there they are cut at {max(lengths.values())} tokens, "
        f"here queries at {lengths['query']} and passages at {lengths['passage']}"
    ]


def _card(name: str, license: str | None, model: TextEmbedder) -> str:
    """Markdown with the metadata the hub reads."""
    args, lengths = model.model.pooler.args, _lengths(model)
    metadata = ["library_name: sentence-transformers", "pipeline_tag: sentence-similarity"]
    metadata += [f"license: {license}"] if license else []
    metadata += ["tags:", "- sentence-transformers", "- feature-extraction"]
    pooling = f"the pooling is `{args.kind}`"
    if args.kind == "attention":
        pooling = (
            f"{args.n_queries} learned {'query reads' if args.n_queries == 1 else 'queries read'} the encoder's tokens "
            f"by cross-attention. `{CODE}` holds that pooler, which sentence-transformers does not have; loading the "
            "model runs it, hence `trust_remote_code=True`. Read it first"
        )
    usage = [
        "from sentence_transformers import SentenceTransformer",
        "",
        f"model = {_loading(name, model)}",
        'queries = model.encode_query(["a question"])',
        'passages = model.encode_document(["an answer", "something else"])',
        "print(model.similarity(queries, passages))",
    ]
    prompts = "".join(f"- before a {role}: `{text}`\n" for role, text in model.prompts.items() if text)
    parts = [
        "---\n" + "\n".join(metadata) + "\n---",
        f"# {name}",
        f"A model of text embeddings: vectors of {model.dim} channels and length 1. Its encoder was pretrained as in "
        f"{PAPER}, then trained with contrastive pairs; {pooling}.",
        "## Use\n\n```python\n" + "\n".join(usage) + "\n```",
        f"Texts are cut at {max(lengths.values())} tokens. " + " ".join(_differences(model)),
    ]
    parts += [f"Prompts, which `encode_query` and `encode_document` add:\n\n{prompts}".rstrip()] if prompts else []
    return "\n\n".join(part.rstrip() for part in parts) + "\n"
