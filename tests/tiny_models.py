"""Encoders of Hugging Face at the smallest size, random but for their seed, each with a tokenizer of its kind."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.tiny_run import SENTENCES

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
CONFIGS = {
    "bert": lambda ids: transformers.BertConfig(**SIZES, **ids, max_position_embeddings=128),
    "minilm": lambda ids: transformers.BertConfig(**SIZES, **ids, max_position_embeddings=128),
    "roberta": lambda ids: transformers.RobertaConfig(
        **SIZES, **ids, max_position_embeddings=130, type_vocab_size=1
    ),
    "electra": lambda ids: transformers.ElectraConfig(
        **SIZES, **ids, max_position_embeddings=128, embedding_size=16
    ),
    "deberta-v3": lambda ids: transformers.DebertaV2Config(
        **SIZES, **ids, max_position_embeddings=128, relative_attention=True, position_buckets=16,
        norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type=["p2c", "c2p"], position_biased_input=False,
        type_vocab_size=0,
    ),
    "modernbert": lambda ids: transformers.ModernBertConfig(
        **SIZES, **ids, max_position_embeddings=128, global_attn_every_n_layers=2, local_attention=8
    ),
    "eurobert": lambda ids: transformers.EuroBertConfig(**SIZES, **ids, max_position_embeddings=128),
    "llama": lambda ids: transformers.LlamaConfig(**SIZES, **ids, max_position_embeddings=128),  # a decoder
    "qwen3": lambda ids: transformers.Qwen3Config(
        **SIZES, **ids, max_position_embeddings=128, head_dim=16, num_key_value_heads=2
    ),  # another
}  # fmt: skip


def make_model(folder: Path, kind: str, seed: int = 0) -> Path:
    """Write a model and its tokenizer; gives the folder."""
    tokenizer = wordpiece() if kind in ("bert", "minilm", "electra") else bytes_bpe()
    if kind == "deberta-v3":
        tokenizer = unigram()
    names = ("pad", "bos", "eos", "cls", "sep")
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in names}
    config = CONFIGS[kind]({"vocab_size": len(tokenizer), **ids})
    torch.manual_seed(seed)
    model = transformers.AutoModel.from_config(config)
    for name, parameter in model.named_parameters():  # far from the small weights of a start, where all layers agree
        if parameter.dim() > 1 and "LayerNorm" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def wordpiece() -> transformers.PreTrainedTokenizerFast:
    """BERT's kind: lower-cased word pieces, ``[CLS] a [SEP] b [SEP]`` with token types."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    raw = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    raw.normalizer, raw.pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    raw.train_from_iterator(SENTENCES, trainers.WordPieceTrainer(vocab_size=150, special_tokens=specials))
    ids = {name: raw.token_to_id(name) for name in specials}
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, model_max_length=128, model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
        bos_token="[CLS]", eos_token="[SEP]",
    )  # fmt: skip


def bytes_bpe() -> transformers.PreTrainedTokenizerFast:
    """RoBERTa's kind: byte-level BPE, ``<s> a </s></s> b </s>``."""
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    raw = Tokenizer(models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, initial_alphabet=alphabet)
    raw.train_from_iterator(SENTENCES, trainer)
    raw.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return _with_specials(raw)


def unigram() -> transformers.PreTrainedTokenizerFast:
    """DeBERTa-v3's kind: unigram pieces that carry the space before them."""
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    raw = Tokenizer(models.Unigram())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=specials, unk_token="<unk>")
    raw.train_from_iterator(SENTENCES, trainer)
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return _with_specials(raw)


def _with_specials(raw: Tokenizer) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, model_max_length=128, model_input_names=["input_ids", "attention_mask"],
        bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>", mask_token="<mask>", cls_token="<s>",
        sep_token="</s>",
    )  # fmt: skip
