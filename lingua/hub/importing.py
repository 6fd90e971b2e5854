"""A model of ours, a EuroBERT or a Llama as a run folder: to train on from (``init.path``), or to evaluate."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from lingua.data import Position
from lingua.errors import UserError
from lingua.files import optional
from lingua.hub.export import OURS, check_new, whole_or_not
from lingua.hub.exported import Exported, load_exported
from lingua.hub.weights import from_source, read_source
from lingua.predictor import Predictor
from lingua.saving import save
from lingua.tokenizer import Tokenizer, TokenizerArgs, build_tokenizer, save_copy
from lingua.transformer import Encoder

FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*.json", "special_tokens_map.json", OURS,
         "lingua_tokenizer/*"]  # fmt: skip


@dataclass
class ImportArgs:
    """Write a model of the hub as a run folder with one checkpoint, of step 0."""

    source: str = "???"  # folder, or id on the hub: an export of ours, or a EuroBERT or bias-free Llama
    to: str = "???"  # run folder to write, new or empty; init.path=FOLDER trains on from it
    seq_len: int = 512  # row length to note in its config; an export of ours brings its own


def import_model(args: ImportArgs) -> None:
    """Write the run folder.

    Raises:
        UserError: no such model, an architecture that ours does not cover, or a folder that has files already.
    """
    to = Path(args.to)
    check_new(to)
    folder = _fetch(args.source)
    found = load_exported(folder) if (folder / OURS).is_file() else _foreign(folder, args.seq_len)
    with whole_or_not(to) as partial:
        _write_run(partial, to, found)
    kind = "BERT" if found.predictor is None else "CrossBERT"
    if found.about.get("objective") == "rtd":
        kind = "discriminator"
    print(f"{to}: a {kind} of {found.encoder.args.n_layers} layers; train on from it with init.path={to}")


def _fetch(source: str) -> Path:
    if Path(source).is_dir():
        return Path(source)
    hub = optional("huggingface_hub", f"source={source}")
    try:
        return Path(hub.snapshot_download(source, allow_patterns=FILES))
    except Exception as error:  # no network, no such repository, no permission: types of several libraries
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"source={source}: no such folder, and the hub does not give it: {reason}") from None


def _foreign(folder: Path, seq_len: int) -> Exported:
    """A EuroBERT or a Llama, with its own vocabulary."""
    config, tensors = read_source(folder)
    encoder, left_out = from_source(config, tensors, str(folder))
    if left_out:
        print(f"{folder}: left out, since the embedding is the output matrix here: {', '.join(left_out)}")
    tokenizer_args = TokenizerArgs("hf", str(folder))
    tokenizer = build_tokenizer(tokenizer_args)
    _fit_vocabulary(encoder, tokenizer, str(folder))
    about = {"model": asdict(encoder.args), "seq_len": seq_len, "seed": 0, "step": 0}
    return Exported(encoder, None, tokenizer, tokenizer_args, about)


def _fit_vocabulary(encoder: Encoder, tokenizer: Tokenizer, where: str) -> None:
    """As many rows in the embedding as the tokenizer has ids: unused ones go, new special tokens get the mean row."""
    weight, count = encoder.embedding.weight.detach(), tokenizer.vocab_size
    if count == len(weight):
        return
    if count < len(weight):
        print(f"{where}: {len(weight) - count} rows of the embedding have no token and are left out")
        weight = weight[:count].clone()
    else:
        new = count - len(weight)
        if new > len(tokenizer.appended):
            raise UserError(
                f"{where}: its tokenizer has {count} ids, its embedding {len(weight)} rows: not of one model"
            )
        print(f"{where}: {', '.join(tokenizer.appended)} are new: their rows of the embedding start as the mean row")
        weight = torch.cat((weight, weight.mean(dim=0, keepdim=True).expand(new, -1)))
    encoder.embedding = nn.Embedding.from_pretrained(weight, freeze=False)
    encoder.args.vocab_size = count


def _write_run(folder: Path, to: Path, found: Exported) -> None:
    """Write the run into ``folder``, which will be called ``to``."""
    save_copy(found.tokenizer, folder / "tokenizer")
    tokenizer: dict[str, Any] = asdict(found.tokenizer_args)
    if tokenizer["path"] is not None:
        tokenizer["path"] = str(to / "tokenizer" / ("" if tokenizer["name"] == "hf" else Path(tokenizer["path"]).name))
    config = yaml.safe_dump(
        {
            "seed": found.about["seed"],
            "model": found.about["model"] | {"vocab_size": found.encoder.args.vocab_size},
            "data": {"seq_len": found.about["seq_len"], "tokenizer": tokenizer},
        }
    )
    (folder / "config.yaml").write_text(config)
    parts: dict[str, Encoder | Predictor] = {"encoder": found.encoder}
    if found.predictor is not None:
        parts["predictor"] = found.predictor
    model = nn.ModuleDict(parts)
    state = {
        "step": 0,
        "objective": found.about.get("objective"),
        "tokenizer": found.tokenizer.identity(),
        "stream_start": asdict(Position()),
        "stream_end": asdict(Position()),
    }
    nothing = torch.optim.SGD(model.parameters())  # a checkpoint has an optimizer; this one has no state
    save(folder / "checkpoints" / f"{0:010d}", model, nothing, state, config)
