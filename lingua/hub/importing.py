"""A model of ours or of the hub as a run folder: to train on from (``init.path``), or to evaluate."""

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
from lingua.hub.architectures import is_causal
from lingua.hub.export import OURS, check_new, whole_or_not
from lingua.hub.exported import Exported, load_exported
from lingua.hub.weights import from_source, read_source
from lingua.predictor import Predictor
from lingua.saving import save
from lingua.tokenizer import Tokenizer, TokenizerArgs, build_tokenizer, save_copy
from lingua.transformer import Encoder

FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*.json", "special_tokens_map.json", OURS,
         "lingua_tokenizer/*"]  # fmt: skip
OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")  # older kinds of file


@dataclass
class ImportArgs:
    """Write a model of the hub as a run folder with one checkpoint, of step 0."""

    source: str = "???"  # folder, or id on the hub: an export of ours, a EuroBERT, Llama, Qwen2 or Qwen3
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
    kind = {"rtd": "discriminator", "clm": "causal model"}.get(found.about.get("objective"), "BERT")
    if found.predictor is not None:
        kind = "CrossBERT"
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
    """A model of another's, with its own vocabulary."""
    config, tensors = read_source(folder)
    encoder, left_out = from_source(config, tensors, str(folder))
    if left_out:
        print(f"{folder}: left out, since nothing here computes with it: {', '.join(left_out)}")
    if "lm_head.weight" not in tensors and not config.get("tie_word_embeddings", True):
        print(f"{folder}: has no output matrix (it is a base model): the embedding is one, model.tied=true")
    _check_tokenizer(folder)
    tokenizer_args = TokenizerArgs("hf", str(folder))
    tokenizer = build_tokenizer(tokenizer_args)
    _fit_vocabulary(encoder, tokenizer, str(folder))
    about = {"model": asdict(encoder.args), "seq_len": seq_len, "seed": 0, "step": 0}
    if is_causal(config):
        about["objective"] = "clm"
    return Exported(encoder, None, tokenizer, tokenizer_args, about)


def _check_tokenizer(folder: Path) -> None:
    """Raise UserError unless the folder has the one file that is read of a tokenizer."""
    if (folder / "tokenizer.json").is_file():
        return
    others = [name for name in OTHER_TOKENIZERS if (folder / name).is_file()]
    hint = "add that of the model it was made of"
    if others:
        hint = (
            f"make it of {others[0]}: transformers.AutoTokenizer.from_pretrained({str(folder)!r})"
            f".save_pretrained({str(folder)!r})"
        )
    raise UserError(f"{folder}: has no tokenizer.json; {hint}")


def _fit_vocabulary(encoder: Encoder, tokenizer: Tokenizer, where: str) -> None:
    """As many rows in the embedding as the tokenizer has ids, and in the output matrix, if that is another.

    Rows without a token go; special tokens that the vocabulary did not have get the mean of all others, whether or not
    there was an unused row in their place.
    """
    count, rows = tokenizer.vocab_size, encoder.args.vocab_size
    known = count - len(tokenizer.appended)
    if known > rows:
        raise UserError(f"{where}: its tokenizer has {known} ids, its embedding {rows} rows: not of one model")
    if rows > count:
        print(f"{where}: {rows - count} rows of the embedding have no token and are left out")
    if tokenizer.appended:
        print(f"{where}: new tokens ({', '.join(tokenizer.appended)}) start as the mean row of the embedding")
    for table in (encoder.embedding, encoder.output):
        if table is not None:
            weight_VD = table.weight.detach()[:known]
            new = weight_VD.mean(dim=0, keepdim=True).expand(count - known, -1)
            table.weight = nn.Parameter(torch.cat((weight_VD, new)))
            table.num_embeddings = count
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
