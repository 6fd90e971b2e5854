"""Encoders from Hugging Face, by id or local folder, with their own tokenizers, as frozen encoders like ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lingua.errors import UserError
from lingua.frozen import FrozenEncoder, NoTokenError, Sequences, check_texts, check_words, usable_device

DEFAULT_LENGTH = 512  # tokens, where the model can take as many: the paper's row length
# What follows the last block, as a child of the model: ModernBERT, EuroBERT and Llama's relatives, NeoBERT.
FINAL_NORMS = ("final_norm", "norm", "layer_norm")


class HFEncoder(FrozenEncoder):
    """Any encoder whose blocks stand in one list and return their states.

    Layer i is the state after block i, taken from the block itself, so it means the same for every architecture:
    models with a norm after their last block (ModernBERT, EuroBERT, NeoBERT) have it applied to every layer but the
    embedding if ``final_norm``, others (BERT, RoBERTa, ELECTRA, DeBERTa, MiniLM) have none. ``causal``: a token sees
    those before it only, as in Llama and its relatives.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, max_length: int, device: str, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.model, self.tokenizer, self.max_length = model.to(device).eval(), tokenizer, max_length
        self.dim, self.n_layers = model.config.hidden_size, model.config.num_hidden_layers
        self.pad_id = tokenizer.pad_token_id
        self._has_types = "token_type_ids" in tokenizer.model_input_names
        self._blocks = next(
            (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == self.n_layers), None
        )
        self.norm = next((getattr(model, name) for name in FINAL_NORMS if hasattr(model, name)), None)
        self._check()

    def text_sequences(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Sequences:
        check_texts(texts)
        check_texts(pairs or [])
        if len(texts) == 0:
            return Sequences([])
        whole = self._tokens(list(texts), None if pairs is None else list(pairs), truncation=False)
        found = Sequences([np.array(ids, dtype=np.int64) for ids in whole["input_ids"]])
        if self._has_types:
            found.types = [np.array(types, dtype=np.int64) for types in whole["token_type_ids"]]
        specials = self.tokenizer.num_special_tokens_to_add(pair=pairs is not None)
        for index, ids in enumerate(found.ids):
            if len(ids) <= specials:
                raise NoTokenError(index, texts[index])
            if len(ids) > self.max_length:
                cut = self._tokens(texts[index], None if pairs is None else pairs[index], truncation=True)
                found.truncated += 1
                found.ids[index] = np.array(cut["input_ids"], dtype=np.int64)
                if found.types is not None:
                    found.types[index] = np.array(cut["token_type_ids"], dtype=np.int64)
        return found

    def word_sequences(self, sentences: Sequence[Sequence[str]]) -> Sequences:
        check_words(sentences)
        if not self.tokenizer.is_fast:
            raise UserError(f"{type(self.tokenizer).__name__} does not tell where tokens stand: words have no pieces")
        found = self.text_sequences([" ".join(words) for words in sentences])
        found.places, kept = [], [np.empty(0, dtype=bool)]
        for index, words in enumerate(sentences):
            cut = self._tokens(
                " ".join(words), None, truncation=True, return_offsets_mapping=True, return_special_tokens_mask=True
            )
            real = np.flatnonzero(np.array(cut["special_tokens_mask"]) == 0)
            spans = np.array(cut["offset_mapping"])[real]
            starts = np.cumsum([0] + [len(word) + 1 for word in words[:-1]])
            # The first token that reaches into the word; a token may begin with the space before it.
            first = np.searchsorted(spans[:, 1], starts, side="right")
            within = first < len(spans)
            kept.append(within)
            found.places.append(real[first[within]])
            ends = starts + [len(word) for word in words]
            missing = within.copy()
            missing[within] = spans[first[within], 0] >= ends[within]
            if missing.any() or (not within.all() and len(cut["input_ids"]) < self.max_length):
                place = int(np.argmax(missing | ~within))
                raise UserError(f"word {place} of sentence {index} ({words[place]!r}) has no token: remove it")
        found.kept = np.concatenate(kept)
        return found

    def _tokens(self, texts: Any, pairs: Any, truncation: bool, **options: Any) -> Any:
        return self.tokenizer(
            texts,
            pairs,
            truncation="longest_first" if truncation else False,
            max_length=self.max_length if truncation else None,
            return_attention_mask=False,
            return_token_type_ids=self._has_types,
            verbose=False,
            **options,
        )

    def layer_states(
        self, tokens_BS: Tensor, types_BS: Tensor | None, lengths_B: Tensor, layers: set[int], final_norm: bool
    ) -> Iterator[tuple[int, Tensor]]:
        states, _ = self._forward(tokens_BS, types_BS, lengths_B, layers)
        for layer, x_BSD in sorted(states.items()):
            yield layer, self.norm(x_BSD) if final_norm and layer and self.norm is not None else x_BSD

    def _forward(
        self, tokens_BS: Tensor, types_BS: Tensor | None, lengths_B: Tensor, layers: set[int]
    ) -> tuple[dict[int, Tensor], Tensor]:
        """States by layer, without final norm, and the model's own last hidden state."""
        states: dict[int, Tensor] = {}

        def before_the_first(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            states[0] = args[0] if args else kwargs["hidden_states"]

        def after(layer: int) -> Any:
            def keep(block: nn.Module, args: tuple, output: Any) -> None:
                states[layer] = output[0] if isinstance(output, tuple) else output

            return keep

        hooks = [self._blocks[layer - 1].register_forward_hook(after(layer)) for layer in layers if layer]
        if 0 in layers:
            hooks.append(self._blocks[0].register_forward_pre_hook(before_the_first, with_kwargs=True))
        try:
            mask_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) < lengths_B[:, None]
            types = {} if types_BS is None else {"token_type_ids": types_BS}
            out = self.model(input_ids=tokens_BS, attention_mask=mask_BS.long(), **types)
        finally:
            for hook in hooks:
                hook.remove()
        return states, out.last_hidden_state

    @torch.inference_mode()
    def _check(self) -> None:
        """Raise UserError unless the last block's state, normed, is the model's own last hidden state."""
        name = type(self.model).__name__
        if getattr(self.model.config, "is_encoder_decoder", False):
            raise UserError(f"{name} is an encoder with a decoder: give a model that is an encoder alone")
        if self._blocks is None:
            raise UserError(f"{name} has no list of {self.n_layers} blocks: its layers cannot be told apart")
        if self.pad_id is None:
            self.pad_id = 0  # masked out, so any id will do
        ids = torch.arange(4, device=self.device)[None]
        types = torch.zeros_like(ids) if self._has_types else None
        length = torch.tensor([4], device=self.device)
        states, last_BSD = self._forward(ids, types, length, {self.n_layers})
        x_BSD = states[self.n_layers] if self.norm is None else self.norm(states[self.n_layers])
        other_BSD = self._forward(ids + (ids == 3), types, length, set())[1]  # after another last token
        self.causal = torch.equal(other_BSD[:, :-1], last_BSD[:, :-1]) and not torch.equal(other_BSD, last_BSD)
        if x_BSD.shape != last_BSD.shape or not torch.allclose(x_BSD, last_BSD, atol=1e-4):
            if self.causal:
                raise UserError(f"{name} is a decoder, whose tokens see only those before them: give an encoder")
            raise UserError(f"{name}: what it does after its last block is not known here: {FINAL_NORMS} are")


def load_hf_encoder(
    name: str,
    max_length: int | None = None,
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
) -> HFEncoder:
    """An encoder by its id on the hub or its folder, with its own tokenizer.

    Args:
        max_length: most tokens of a sequence; None: 512, or what the model can take if that is less.
        trust_remote_code: run the Python files that come with the model (NeoBERT needs it).

    Raises:
        UserError: no such model, no connection, weights that are not those of an encoder, a decoder whose
            ending is not known, or too long a sequence.
    """
    if (Path(name) / "config.yaml").is_file() and not (Path(name) / "config.json").is_file():
        raise UserError(f"hf:{name}: is a run of this library, not a model of transformers: give ckpt={name}")
    check_folder(name, "hf")
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            f"evaluating hf:{name} needs transformers ({error}): pip install -r requirements-eval.txt"
        ) from None
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        model, info = transformers.AutoModel.from_pretrained(
            name, dtype=torch.float32, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    except Exception as error:  # of several libraries: no such repository, no network, unknown architecture
        raise not_loaded(f"hf:{name}", error) from None
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
    random = sorted(key for key in info["missing_keys"] if "pooler" not in key)
    if random:
        raise UserError(
            f"hf:{name}: its files lack {len(random)} of the encoder's weights ({', '.join(random[:3])}, ...), which "
            "would be random"
        )
    longest = longest_sequence(model.config, tokenizer)
    if max_length is not None and not 4 <= max_length <= longest:
        raise UserError(f"max_length={max_length}: hf:{name} takes 4 to {longest} tokens")
    length = min(DEFAULT_LENGTH, longest) if max_length is None else max_length
    try:
        return HFEncoder(model, tokenizer, length, usable_device(device), dtype)
    except UserError:
        raise
    except Exception as error:  # such as an encoder with a decoder, which wants the inputs of both
        raise UserError(
            f"hf:{name}: {type(model).__name__} cannot be used as an encoder: {' '.join(str(error).split())[:300]}"
        ) from None


def check_folder(name: str, kind: str) -> None:
    """Raise UserError if ``name`` is written as a path, as no id on the hub can be, and no folder is there.

    Args:
        kind: hf | st, what stands before the name.
    """
    if (name.startswith(("/", ".", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        raise UserError(
            f"{kind}:{name}: there is no folder {Path(name).absolute()}: give that of a model, or its id on the hub"
        )


def not_loaded(name: str, error: Exception) -> UserError:
    """What a user is told where a library cannot load the model ``name``."""
    hint = "check the id or folder and the connection to the hub"
    if "trust_remote_code" in str(error):
        hint = "this model comes with code of its own: read it, then give trust_remote_code=true"
    return UserError(f"{name}: cannot be loaded: {' '.join(str(error).split())[:500]}; {hint}")


def longest_sequence(config: Any, tokenizer: Any) -> int:
    """Most tokens, specials included, that model and tokenizer are made for."""
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "max_length", None) or 512
    if config.model_type in ("roberta", "xlm-roberta", "camembert"):
        positions -= config.pad_token_id + 1  # their positions count from behind the padding's
    return min(positions, tokenizer.model_max_length)


def parameter_counts(model: Any) -> dict[str, int]:
    """Weights of all kinds: ``total``, and ``without_embedding`` of the tokens."""
    total = sum(parameter.numel() for parameter in model.parameters())
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.num_embeddings == model.config.vocab_size]
    return {"total": total, "without_embedding": total - tables[0].weight.numel()}
