import base64
import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from lingua.errors import UserError
from lingua.manifest import load_manifest
from lingua.preparation.readers import ReaderArgs
from lingua.preparation.shuffle import ShuffleArgs, shuffle
from lingua.tokenizer import SPECIALS, RobertaTokenizer, TokenizerArgs, build_tokenizer
from tests.corpora import write_jsonl
from tests.real_text import ODD_TEXTS, real_lines
from tests.support import run_offline


def build(name, path=None, pattern=None):
    return build_tokenizer(TokenizerArgs(name, None if path is None else str(path), pattern))


@pytest.fixture(scope="module")
def gpt2_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt2") / "gpt2.tiktoken"
    ranks = RobertaTokenizer().ranks
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()))
    return path


@pytest.fixture(scope="module")
def byte_bpe(tmp_path_factory):
    """A folder as a decoder's on the hub: byte-level BPE with <|endoftext|> alone."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(real_lines(300), trainer)
    library.enable_truncation(5)
    folder = tmp_path_factory.mktemp("bpe")
    library.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def word_piece(tmp_path_factory):
    """A folder as BERT's: all five, under names of its own."""
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    names = ["[PAD]", "[UNK]", "[START]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=names, show_progress=False)
    library.train_from_iterator(real_lines(300), trainer)
    folder = tmp_path_factory.mktemp("wordpiece")
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"cls_token": "[START]", "bos_token": None}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"mask_token": {"content": "[MASK]", "lstrip": True}}))
    return folder


def test_bytes():
    tokenizer = build("bytes")
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.mask_id) == (261, 256, 260)
    for text in ODD_TEXTS + real_lines(50):
        (ids,) = tokenizer.encode_batch([text])
        assert ids.dtype == np.int32
        assert ids.tolist() == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([256, 104, 105, 260, 258]) == "<s>hi<mask></s>"
    assert tokenizer.encode_batch(["\ud800"])[0].tolist() == list("\ufffd".encode())


def test_tiktoken_file_is_the_vocabulary_it_says(gpt2_file):
    tokenizer, roberta = build("tiktoken", gpt2_file, "gpt2"), RobertaTokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.mask_id) == (50_261, 50_256, 50_260)
    assert tokenizer.special_ids == tuple(range(50_256, 50_261))
    rank_of_id = {4 + i: roberta.ranks[token] for i, token in enumerate(roberta.token_bytes)}
    for text in ODD_TEXTS + real_lines(300):
        (ids,), (other,) = tokenizer.encode_batch([text]), roberta.encode_batch([text])
        assert ids.tolist() == [rank_of_id[i] for i in other.tolist()]
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([50_256, 50_260]) == "<s><mask>"


def test_the_pattern_is_part_of_what_a_vocabulary_is(gpt2_file):
    gpt2, default = build("tiktoken", gpt2_file, "gpt2"), build("tiktoken", gpt2_file)
    own = build("tiktoken", gpt2_file, r"\S+|\s+")
    assert gpt2.identity() != default.identity() != own.identity()
    assert build("tiktoken", gpt2_file, "cl100k").identity() == default.identity()
    assert [len(ids) for t in (gpt2, default) for ids in t.encode_batch(["1234567"])] == [3, 3]
    digits = default.encode_batch(["1234567"])[0]
    assert [default.decode([i]) for i in digits] == ["123", "456", "7"]


def test_hf_ids_are_the_librarys(byte_bpe, word_piece):
    for folder in (byte_bpe, word_piece):
        tokenizer = build("hf", folder)
        library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        library.no_truncation()
        for text in real_lines(300) + ODD_TEXTS[:12]:
            assert tokenizer.encode_batch([text])[0].tolist() == library.encode(text, add_special_tokens=False).ids
        assert build("hf", folder / "tokenizer.json").identity() == tokenizer.identity()


def test_hf_appends_what_is_missing(byte_bpe):
    tokenizer = build("hf", byte_bpe)
    size = tokenizers.Tokenizer.from_file(str(byte_bpe / "tokenizer.json")).get_vocab_size()
    assert tokenizer.bos_id == tokenizer.eos_id == 0
    assert tokenizer.appended == ("<pad>", "<unk>", "<mask>")
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.mask_id) == (size, size + 1, size + 2)
    assert tokenizer.vocab_size == size + 3
    assert tokenizer.special_ids == (0, size, size + 1, size + 2)
    assert tokenizer.identity()["appended"] == ["<pad>", "<unk>", "<mask>"]
    ids = tokenizer.encode_batch(["Hello"])[0].tolist()
    assert tokenizer.decode([0, *ids, size + 2, 0]) == "<|endoftext|>Hello<mask><|endoftext|>"


def test_hf_finds_the_names_of_its_specials(word_piece):
    tokenizer = build("hf", word_piece)
    ids = (tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id)
    assert ids == (0, 1, 2, 3, 4)
    assert tokenizer.appended == ()
    assert tokenizer.special_ids == (0, 1, 2, 3, 4)


def test_special_names_in_text_stay_text(gpt2_file, byte_bpe, word_piece):
    for tokenizer in (build("bytes"), build("tiktoken", gpt2_file), build("hf", byte_bpe), build("hf", word_piece)):
        text = " ".join(SPECIALS) + " [MASK] <|endoftext|> [SEP]"
        ids = set(tokenizer.encode_batch([text])[0].tolist())
        assert not ids & (set(tokenizer.special_ids) - {tokenizer.unk_id})


def test_what_was_appended_is_said_and_kept(byte_bpe, tmp_path, capsys):
    write_jsonl(tmp_path / "a.jsonl", real_lines(20))
    args = ShuffleArgs(tokenizer=TokenizerArgs("hf", str(byte_bpe)), valid_fraction=0)
    shuffle("web", ReaderArgs(path=f"{tmp_path}/a.jsonl"), args, tmp_path)
    assert "the vocabulary lacks <pad> <unk> <mask>: appended, ids from 400" in capsys.readouterr().out
    manifest = load_manifest(tmp_path / "web" / "train")
    assert manifest.tokenizer["appended"] == ["<pad>", "<unk>", "<mask>"]
    manifest.check_tokenizer(build("hf", byte_bpe))
    with pytest.raises(UserError, match="another tokenizer: kind of the shards hf, of the config bytes"):
        manifest.check_tokenizer(build("bytes"))


def test_bad_vocabularies(tmp_path, gpt2_file, byte_bpe):
    with pytest.raises(UserError, match=r"tokenizer\.name=tiktoken needs path=FILE"):
        TokenizerArgs("tiktoken")
    with pytest.raises(UserError, match="bytes takes no path"):
        TokenizerArgs("bytes", "x")
    with pytest.raises(UserError, match="hf takes no pattern"):
        TokenizerArgs("hf", "x", "gpt2")
    with pytest.raises(UserError, match=r"none\.tiktoken: no such file"):
        build("tiktoken", tmp_path / "none.tiktoken")
    (tmp_path / "bad").write_bytes(b"IQ== 0\nnot base64! 1\n")
    with pytest.raises(UserError, match="bad, line 2: expected a base64 token and its rank"):
        build("tiktoken", tmp_path / "bad")
    (tmp_path / "half").write_bytes(b"".join(gpt2_file.read_bytes().splitlines(True)[300:]))
    with pytest.raises(UserError, match=r"half: not a whole vocabulary: byte 0x[0-9a-f]{2} is no token"):
        build("tiktoken", tmp_path / "half")
    with pytest.raises(UserError, match="not a regular expression"):
        build("tiktoken", gpt2_file, "(")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no such file: .*empty/tokenizer\.json"):
        build("hf", tmp_path / "empty")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer\.json file"):
        build("hf", tmp_path)
    library = tokenizers.Tokenizer.from_file(str(byte_bpe / "tokenizer.json"))
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"mask_token": "<|endoftext|>"}')
    with pytest.raises(UserError, match="<mask> shares id 0 with another special token"):
        build("hf", tmp_path)
    library.add_tokens(["<mask>"])  # an ordinary token, which text can spell
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match="the text '<mask>' is encoded as a special token"):
        build("hf", tmp_path)


def test_offline_an_id_is_named(tmp_path):
    code = "from lingua.tokenizer import *; build_tokenizer(TokenizerArgs('hf', 'someone/something'))"
    done = run_offline(code, tmp_path)
    assert "tokenizer.path=someone/something: no such folder, and the hub does not give it: " in done.stderr
    assert "setup/download_tokenizer.py" in done.stderr
