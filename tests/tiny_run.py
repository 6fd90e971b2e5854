"""A real run folder at the smallest size: vocabulary, config, checkpoint. Shared by the tests of evaluation."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from lingua.predictor import Predictor, PredictorArgs
from lingua.saving import save
from lingua.tokenizer import SentencePieceTokenizer, TokenizerArgs, build_tokenizer
from lingua.transformer import Encoder, TransformerArgs, init_weights

SENTENCES = [
    "The quick brown fox doesn't jump over the lazy dog .",
    "Some dogs sleep all day ; others run in the park and bark at every fox .",
    "It cost $ 3.50 in 1999 , about one-third of today's price !",
    "She said : `` Where is the state-of-the-art naïve café ? ''",
    "A river runs through the old town , and small boats go up and down .",
]


def train_sentencepiece(path: Path, vocab_size: int = 150) -> Path:
    """A unigram vocabulary over SENTENCES with the five special pieces; gives ``path``.model."""
    import sentencepiece

    corpus = path.with_suffix(".txt")
    corpus.write_text("\n".join(SENTENCES * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(path),
        vocab_size=vocab_size,
        bos_id=0,
        pad_id=1,
        eos_id=2,
        unk_id=3,
        control_symbols=["<mask>"],
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    return path.with_suffix(".model")


def make_run(folder: Path, tokenizer: dict[str, Any], vocab_size: int, **changes: Any) -> Path:
    """Write a run with one checkpoint, at step 3, whose weights are not those of the seed.

    ``changes``: ``predictor`` (a dict) makes it a CrossBERT; the others replace fields of the encoder.
    """
    predictor = changes.pop("predictor", None)
    args = TransformerArgs(**{"dim": 32, "n_layers": 2, "n_heads": 2, "vocab_size": vocab_size, **changes})
    model, model_config = nn.ModuleDict({"encoder": Encoder(args)}), asdict(args)
    if predictor is not None:
        predictor_args = PredictorArgs(**predictor)
        model["predictor"] = Predictor(predictor_args, args)
        model_config["predictor"] = asdict(predictor_args)
    init_weights(model, replace(args, init_std=0.2), seed=99)
    config = {"seed": 7, "model": model_config, "data": {"seq_len": 256, "tokenizer": tokenizer}}
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 3, "loss": 5.0}) + "\n")
    state = {"step": 3, "tokenizer": build_tokenizer(TokenizerArgs(**tokenizer)).identity()}
    optimizer = torch.optim.AdamW(model.parameters())
    save(folder / "checkpoints" / f"{3:010d}", model, optimizer, state, yaml.safe_dump(config))
    return folder


def make_pieces_run(folder: Path, **changes: Any) -> Path:
    """:func:`make_run` at ``folder/run``, with a vocabulary of its own beside it."""
    model = train_sentencepiece(folder / "pieces")
    vocab_size = SentencePieceTokenizer(str(model)).vocab_size
    return make_run(folder / "run", {"name": "sentencepiece", "path": str(model)}, vocab_size, **changes)
