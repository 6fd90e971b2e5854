import sys

import pytest

from lingua.errors import UserError
from lingua.manifest import load_manifest
from lingua.preparation import languages
from lingua.preparation.languages import described, language, language_statistics
from lingua.preparation.shuffle import ShuffleArgs
from lingua.tokenizer import TokenizerArgs, build_tokenizer
from tests.corpora import write_jsonl
from tests.lingua.preparation.test_shuffle_scale import prepare, texts_of

SENTENCES = {
    "en": "The old captain remembers the long road to the harbour and everything that he left behind there.",
    "de": "Der alte Kapitän erinnert sich an den langen Weg zum Hafen und an alles, was er dort zurückließ.",
    "fr": "Le vieux capitaine se souvient de la longue route vers le port et de tout ce qu'il y a laissé.",
    "ru": "Старый капитан помнит долгую дорогу в гавань и всё, что он там оставил.",
}
SHARES = {"en": 50, "de": 30, "fr": 15, "ru": 5}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    texts = [f"{SENTENCES[code]} {i}" for code, share in SHARES.items() for i in range(8 * share)]
    for i in range(4):
        write_jsonl(folder / f"{i}.jsonl", texts[i::4])
    return folder


def test_shares_of_all_and_of_a_sample(corpus, tmp_path):
    """All documents: the true shares; a sample: those of the first documents of the order, counted by hand."""
    whole = prepare(f"{corpus}/*.jsonl", tmp_path / "all")["train"]
    assert whole.languages == {"documents": 800, "shares": {"en": 0.5, "de": 0.3, "fr": 0.15, "ru": 0.05}}
    sample = prepare(f"{corpus}/*.jsonl", tmp_path / "some", languages=120, shard_tokens=2000)["train"]
    assert len(sample.shards) > 40  # so the sample lies in several
    first = [text[:10] for text in texts_of(sample)[:120]]
    by_hand = {code: first.count(sentence[:10]) / 120 for code, sentence in SENTENCES.items()}
    assert sample.languages["documents"] == 120
    assert sample.languages["shares"] == pytest.approx(by_hand, abs=1e-4)
    assert list(sample.languages["shares"].values()) == sorted(sample.languages["shares"].values(), reverse=True)
    for code, share in SHARES.items():  # three standard deviations
        assert abs(by_hand[code] - share / 100) < 3 * (share / 100 * (1 - share / 100) / 120) ** 0.5


def test_the_sample_depends_on_neither_workers_nor_memory_nor_files_formats(corpus, tmp_path):
    expected = prepare(f"{corpus}/*.jsonl", tmp_path / "one", languages=50)["train"].languages
    other = prepare(f"{corpus}/*.jsonl", tmp_path / "two", languages=50, workers=2, memory_gb=1e-4)["train"].languages
    assert other == expected
    seeded = prepare(f"{corpus}/*.jsonl", tmp_path / "three", languages=50, seed=3)["train"].languages
    assert seeded != expected


def test_each_split_has_its_own_and_none_is_none(corpus, tmp_path):
    manifests = prepare(f"{corpus}/*.jsonl", tmp_path / "a", valid_fraction=0.1, languages=200)
    assert manifests["train"].languages["documents"] == 200
    assert manifests["valid"].languages["documents"] == manifests["valid"].documents < 200
    none = prepare(f"{corpus}/*.jsonl", tmp_path / "b", languages=0)["train"]
    assert none.languages == {} == load_manifest(none.folder).languages
    with pytest.raises(UserError, match=r"settings\.languages was 0, now 5"):
        prepare(f"{corpus}/*.jsonl", tmp_path / "b", languages=5)
    with pytest.raises(UserError, match="languages=-1: expected at least 0"):
        ShuffleArgs(languages=-1)


def test_special_tokens_and_what_is_no_language(tmp_path):
    """Only the text is looked at, and only its beginning."""
    assert [language(text) for text in ("", " \n", "qx", SENTENCES["de"])] == ["und", "und", "und", "de"]
    assert language(SENTENCES["fr"] * 12 + SENTENCES["ru"] * 100) == "fr"
    seen = []
    write_jsonl(tmp_path / "a.jsonl", [SENTENCES["ru"] * 40])
    manifest = prepare(tmp_path / "a.jsonl", tmp_path / "out", languages=0)["train"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(languages, "language", lambda text: seen.append(text) or "xx")
        found = language_statistics(manifest, build_tokenizer(TokenizerArgs("bytes")), 9)
    assert found == {"documents": 1, "shares": {"xx": 1.0}}
    assert seen[0].startswith("Старый капитан")
    assert len(seen[0].encode()) == languages.TOKENS - 1  # of which one was <s>


def test_in_words():
    assert described({}) == ""
    few = {"documents": 1000, "shares": {"en": 0.981, "de": 0.019}}
    assert described(few) == "languages en 98.1 %, de 1.9 % (of 1,000 documents)"
    many = {"documents": 20, "shares": {"en": 0.5, "de": 0.2, "fr": 0.1, "ru": 0.1, "it": 0.1}}
    assert described(many) == "languages en 50.0 %, de 20.0 %, fr 10.0 %, others 20.0 % (of 20 documents)"


def test_a_missing_package_is_said_before_any_work(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    with pytest.raises(
        UserError, match=r"telling languages \(languages=0: do not\) needs the package py3langid .*requirements\.txt"
    ):
        prepare(f"{corpus}/*.jsonl", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    prepare(f"{corpus}/*.jsonl", tmp_path / "out", languages=0)
