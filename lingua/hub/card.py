"""The model card (README.md) of an exported folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lingua.features import TextEncoder
from lingua.hub.vocabulary import special_names
from lingua.metrics import read_metrics
from lingua.predictor import Predictor
from lingua.storage import is_local

PAPER = (
    "[Separating Representation from Reconstruction Enables Scalable Text Encoders](https://arxiv.org/abs/2607.04011)"
)


# What each architecture needs to look both ways.
VERSIONS = {
    "eurobert": " since version 5",
    "qwen3": " (both ways by `is_causal: false` in its config; tried with version 5.24)",
}


def model_card(
    name: str,
    license: str | None,
    loaded: TextEncoder,
    predictor: Predictor | None,
    run: Path,
    step: int,
    objective: str | None = None,
    architecture: str = "eurobert",
) -> str:
    """Markdown with the metadata the hub reads: what it is, how it was trained, how to use it, its scores.

    Args:
        run: the run folder.
        step: of the checkpoint that is exported.
        objective: that the checkpoint says it was trained for.
        architecture: of ``transformers``, that it is exported as.
    """
    masked_lm = predictor is None and objective != "rtd"
    kind = "BERT (masked language modelling)" if masked_lm else "the encoder of a CrossBERT"
    if objective == "rtd":
        kind = "the discriminator of an ELECTRA (replaced token detection)"
    metadata = ["library_name: transformers"]
    metadata += [f"license: {license}"] if license else []
    fills_masks = masked_lm and architecture == "eurobert"  # there is no Qwen3 for masked language modelling
    metadata += [f"pipeline_tag: {'fill-mask' if fills_masks else 'feature-extraction'}"]
    metadata += ["tags:", "- feature-extraction", "- sentence-transformers"]
    parts = [
        "---\n" + "\n".join(metadata) + "\n---",
        f"# {name}",
        f"A text encoder: {kind}, pretrained as in {PAPER}. The architecture is `{architecture}`, which "
        f"`transformers` has{VERSIONS[architecture]}: no remote code is needed.",
        _usage(name, loaded, masked_lm, predictor is not None, architecture),
        "## Shape\n\n" + _table(_shape(loaded, predictor)),
        "## Training\n\n" + _table(_training(loaded.config, run, step)),
        "Embeddings are means over all tokens of the last layer, after its norm; the encoder was not trained for "
        "similarity. A text longer than the training rows is cut.",
    ]
    scores = _scores(run, step)
    if scores:
        parts.append("## Scores of the frozen encoder\n\n" + scores)
    return "\n\n".join(parts) + "\n"


def _usage(name: str, loaded: TextEncoder, masked_lm: bool, has_predictor: bool, architecture: str) -> str:
    mask = special_names(loaded.tokenizer)["mask"]
    head = "AutoModelForCausalLM" if masked_lm and architecture == "qwen3" else "pipeline"
    lines = [
        "from sentence_transformers import SentenceTransformer",
        f"from transformers import AutoModel, AutoTokenizer, {head}",
        "",
        f'tokenizer, model = AutoTokenizer.from_pretrained("{name}"), AutoModel.from_pretrained("{name}")',
        'states = model(**tokenizer("some text", return_tensors="pt")).last_hidden_state',
        f'vectors = SentenceTransformer("{name}").encode(["some text", "and more"])  # means over tokens',
    ]
    if masked_lm and architecture == "qwen3":
        lines.append(
            f'head = AutoModelForCausalLM.from_pretrained("{name}")  # logits of each position itself, seen both ways'
        )
    elif masked_lm:
        lines.append(f'pipeline("fill-mask", "{name}")("The cat {mask} on the mat.")')
    text = "## Use\n\n```python\n" + "\n".join(lines) + "\n```"
    if not masked_lm:
        text += "\n\nThe encoder itself predicts no tokens."
    if has_predictor:
        text += " `predictor.safetensors` holds the predictor that does, for the library it was trained with."
    return text


def _shape(loaded: TextEncoder, predictor: Predictor | None) -> dict[str, Any]:
    args = loaded.encoder.args
    rows = {
        "layers": args.n_layers,
        "width": args.dim,
        "heads": args.n_heads if args.n_kv_heads == -1 else f"{args.n_heads}, of keys and values {args.n_kv_heads}",
        "feed-forward width": loaded.encoder.layers[0].ffn.w2.in_features,
        "vocabulary": f"{args.vocab_size:,} ({loaded.tokenizer.kind})",
        "parameters of the encoder": f"{sum(p.numel() for p in loaded.encoder.parameters()):,}",
    }
    if predictor is not None:
        rows["parameters of the predictor"] = f"{sum(p.numel() for p in predictor.parameters()):,}"
    return rows


def _training(config: dict[str, Any], run: Path, step: int) -> dict[str, Any]:
    rows: dict[str, Any] = {"steps": f"{step:,}", "tokens in a row": config["data"]["seq_len"]}
    if (config.get("init") or {}).get("path"):
        rows["start"] = "the weights of another model or run: name it here, and mind its licence"
    records = read_metrics(run / "metrics.jsonl") if is_local(run) else []
    record = next((r for r in records if r["step"] == step and "flops" in r), None)
    if record is not None:
        rows |= {
            "tokens (each view of a row counts)": f"{record['tokens']:,}",
            "tokens of text": f"{record['data_tokens']:,}",
            "training FLOPs, as the paper counts": f"{record['flops']:.3g}",
        }
    masking, optim = config.get("masking") or {}, config.get("optim") or {}
    if "hidden_ratio" in masking:
        rows["hidden positions"] = f"{100 * masking['hidden_ratio']:g}%"
    if "complementary" in masking:
        rows["complementary masks"] = "yes" if masking["complementary"] else "no"
    if "lr" in optim:
        rows["peak learning rate"] = f"{optim['lr']:g} ({optim['scheduler']})"
    if config.get("batch_tokens"):
        rows["tokens in a step"] = f"{config['batch_tokens']:,}"
    return rows


def _scores(run: Path, step: int) -> str:
    """The tables of this checkpoint's evaluation, if there is one."""
    found = run / "eval" / f"{step:010d}"
    if not (found / "results.json").is_file() or not (found / "results.md").is_file():
        return ""
    versions = json.loads((found / "results.json").read_text()).get("versions", {})
    # Its first paragraph names the checkpoint's path.
    tables = (found / "results.md").read_text().split("\n\n", 1)[1].strip()
    return f"Scores x 100 ({', '.join(f'{name} {version}' for name, version in versions.items())}).\n\n{tables}"


def _table(rows: dict[str, Any]) -> str:
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())
