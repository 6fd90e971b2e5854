"""A checkpoint as a folder that ``transformers`` and ``sentence-transformers`` load without code of ours."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lingua import checkpoint
from lingua.errors import UserError
from lingua.features import load_encoder, run_folder
from lingua.files import optional
from lingua.hub.architectures import EXPRESSED, architecture, transformers_config
from lingua.hub.card import model_card
from lingua.hub.vocabulary import special_names, to_library
from lingua.hub.weights import to_transformers
from lingua.predictor import Predictor, PredictorArgs
from lingua.tokenizer import Tokenizer, save_copy
from lingua.transformer import Encoder, TransformerArgs

OURS = "lingua.json"  # what our own loader needs beyond the rest
ORIGINAL_TOKENIZER = "lingua_tokenizer"  # folder of the files that the run's tokenizer was read from
OUTPUT = "output.weight"  # beside a predictor: its output matrix, if that is not the embedding
FORMAT = 1  # of OURS
STOCK = "sentence_transformers.models."  # the library's own modules
POOLING_MODES = {"mean": "mean_tokens", "first": "cls_token", "max": "max_tokens", "last": "lasttoken"}


@dataclass
class ExportArgs:
    """Write a checkpoint as a model that sentence-transformers loads, its encoder also as one of transformers.

    Of a pretraining run it is the encoder, pooled by the mean; of ``apps.embed`` the embedding model.
    """

    ckpt: str = "???"  # run folder (its newest complete checkpoint) or checkpoint folder
    to: str = "???"  # folder to write, new or empty
    name: str | None = None  # the model's name in its card; none: that of the folder
    license: str | None = None  # of the weights, for the card, such as apache-2.0
    push: str | None = None  # user/name: also upload it there, with the token of `hf auth login` or HF_TOKEN
    private: bool = True  # a repository that push creates is private

    def __post_init__(self) -> None:
        if self.push is not None and (self.push.count("/") != 1 or not all(self.push.split("/"))):
            raise UserError(f"push={self.push}: expected user/name")


def export(args: ExportArgs) -> None:
    """Write the folder, and push it if asked.

    Raises:
        UserError: no usable checkpoint, something that no architecture of transformers or no tokenizer.json can
            express, a folder that has files already, or a hub that refuses.
    """
    to = Path(args.to)
    check_new(to)
    optional("tokenizers", "export")
    folder = checkpoint.resolve(args.ckpt)
    if "backbone" in checkpoint.read_state(folder):
        from lingua.hub.embedding import export_embedder

        export_embedder(args, folder)
        return
    with checkpoint.in_use(folder):
        loaded = load_encoder(folder, device="cpu", run=run_folder(args.ckpt, folder))
        config, state = loaded.config, checkpoint.read_state(folder)
        objective = state.get("objective")
        check_expressed(config["model"], objective, str(folder))
        kind = architecture(loaded.encoder.args, str(folder))
        predictor = load_predictor(folder, loaded.encoder, config["model"])
    library = to_library(loaded.tokenizer)
    run = run_folder(args.ckpt, folder)
    name = args.name or to.resolve().name
    card = model_card(name, args.license, loaded, predictor, run, state["step"], objective, kind)
    with whole_or_not(to) as partial:
        _write(partial, kind, loaded.encoder, predictor, loaded.tokenizer, library, config, state)
        (partial / "README.md").write_text(card)
    print(f"{to}: written as {kind}; AutoModel.from_pretrained({str(to)!r}) loads it")
    if args.push is not None:
        push(to, args.push, args.private)


def check_new(to: Path) -> None:
    """Raise UserError if something would be overwritten."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"to={to}: is there already; give a new folder, or remove it")


@contextlib.contextmanager
def whole_or_not(to: Path) -> Iterator[Path]:
    """A folder to write into, which takes the name ``to`` once all is written; what fails is removed."""
    partial = to.with_name(to.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        partial.replace(to)
    except OSError as error:
        raise UserError(f"to={to}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_expressed(model: dict[str, Any], objective: str | None, where: str) -> None:
    """Raise UserError if the encoder does what no architecture of transformers does."""
    if objective == "clm":
        raise UserError(
            f"{where}: was trained to predict each next token (objective=clm), with causal attention; what is exported "
            "looks both ways and would compute something else. Train it on with objective=mlm first"
        )
    neutral = asdict(TransformerArgs())  # a field that does nothing has its default
    unknown = sorted(key for key in set(model) - EXPRESSED if key not in neutral or model[key] != neutral[key])
    if unknown:
        raise UserError(
            f"{where}: model.{unknown[0]}={model[unknown[0]]} cannot be exported: the architectures of transformers "
            "that are exported as have nothing of the kind"
        )


def load_predictor(folder: Path, encoder: Encoder, model: dict[str, Any]) -> Predictor | None:
    """The predictor of a CrossBERT's checkpoint, or None if the model has none."""
    if model.get("predictor") is None:
        return None
    predictor = Predictor(PredictorArgs(**model["predictor"]), encoder.args)
    checkpoint.load(folder, nn.ModuleDict({"predictor": predictor}), None)
    return predictor.eval()


def _write(
    to: Path,
    kind: str,
    encoder: Encoder,
    predictor: Predictor | None,
    tokenizer: Tokenizer,
    library: Any,
    config: dict[str, Any],
    state: dict[str, Any],
) -> None:
    data = config["data"]
    masked_lm = predictor is None and state.get("objective") != "rtd"
    write_encoder(to, kind, encoder, tokenizer, library, longest_row(data), masked_lm)
    if predictor is not None:
        own_output = {} if encoder.args.tied else {OUTPUT: encoder.output_VD.detach()}
        write_weights(to / "predictor.safetensors", predictor.state_dict() | own_output)
    write_pipeline(
        to, [("1_Pooling", STOCK + "Pooling", pooling_config(encoder.args.dim, "mean"))], data["seq_len"], {}
    )

    # Paths of the machine it was trained on stay there.
    own = data["tokenizer"] | {"path": ORIGINAL_TOKENIZER if tokenizer.files else None}
    model = asdict(encoder.args) | {k: v for k, v in config["model"].items() if k == "predictor"}
    ours = {
        "format": FORMAT,
        "model": model,
        "seq_len": data["seq_len"],
        "seed": config["seed"],
        "step": state["step"],
        "objective": state.get("objective"),
        "tokenizer": own,
        "tokenizer_identity": tokenizer.identity(),
    }
    write_json(to / OURS, ours)
    save_copy(tokenizer, to / ORIGINAL_TOKENIZER)


def longest_row(data: dict[str, Any]) -> int:
    """Tokens of the longest row that a pretraining had."""
    return max(data["seq_len"], *(phase.get("seq_len") or 0 for phase in data.get("phases") or [{}]))


def write_encoder(
    to: Path, kind: str, encoder: Encoder, tokenizer: Tokenizer, library: Any, longest: int, masked_lm: bool
) -> None:
    """What ``AutoModel`` and ``AutoTokenizer`` load.

    Args:
        kind: the architecture of ``transformers``.
        library: the tokenizer as the ``tokenizers`` library has it.
        longest: most tokens of a text.
        masked_lm: the output matrix is that of masked language modelling.
    """
    ids = {role: getattr(tokenizer, f"{role}_id") for role in ("bos", "pad", "eos", "mask")}
    write_json(to / "config.json", transformers_config(encoder.args, kind, longest, ids, masked_lm))
    write_weights(to / "model.safetensors", to_transformers(encoder, masked_lm))
    names = special_names(tokenizer)
    library.save(str(to / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "cls_token": names["bos"],
        "sep_token": names["eos"],
        **{f"{role}_token": name for role, name in names.items()},
    }
    write_json(to / "tokenizer_config.json", settings)


def pooling_config(dim: int, kind: str) -> dict[str, Any]:
    """Of the library's own pooling module. Args: kind: as :data:`POOLING_MODES` has it."""
    modes = {f"pooling_mode_{mode}": name == kind for name, mode in POOLING_MODES.items()}
    return {"word_embedding_dimension": dim, **modes, "include_prompt": True}


def write_pipeline(
    to: Path, modules: list[tuple[str, str, dict[str, Any] | None]], max_length: int, prompts: dict[str, str]
) -> None:
    """What ``SentenceTransformer`` loads beside the encoder.

    Args:
        modules: folder, class and config of each module behind the encoder; None for one that has no config.
        prompts: what stands before a text, by role.
    """
    described = [{"idx": 0, "name": "0", "path": "", "type": STOCK + "Transformer"}]
    for index, (path, kind, config) in enumerate(modules, start=1):
        described.append({"idx": index, "name": str(index), "path": path, "type": kind})
        (to / path).mkdir()
        if config is not None:
            write_json(to / path / "config.json", config)
    write_json(to / "modules.json", described)
    write_json(to / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    write_json(to / "config_sentence_transformers.json", {"prompts": prompts, "similarity_fn_name": "cosine"})


def write_weights(path: Path, weights: dict[str, Tensor]) -> None:
    """Write weights in float32 as safetensors, readable by whom ``config.json`` beside them is."""
    from safetensors.torch import save_file

    whole = {name: weight.to(torch.float32).contiguous() for name, weight in weights.items()}
    save_file(whole, path, metadata={"format": "pt"})
    shutil.copymode(path.with_name("config.json"), path)  # it would be readable by its owner alone


def write_json(path: Path, value: Any) -> None:
    """Write a value as ``transformers`` writes its files."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def push(folder: Path, repository: str, private: bool) -> None:
    """Upload a folder as ``user/name`` with the user's own token. Raises UserError if the hub refuses."""
    hub = optional("huggingface_hub", "push")
    try:
        api = hub.HfApi()
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=repository, commit_message="Export")
    except Exception as error:  # of several libraries: no token, no right, no network
        reason = " ".join(str(error).split())[:400]
        raise UserError(
            f"push={repository}: the hub refuses: {reason}; `hf auth login`, or a token that may write in HF_TOKEN. "
            f"The folder {folder} is complete"
        ) from None
    print(f"pushed to {url}")
