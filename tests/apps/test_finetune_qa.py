"""Windows over paragraphs and alignment of words: every character of awkward text survives the way there and back."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from apps.finetune.args import QaArgs
from apps.finetune.data import whole_sentences
from apps.finetune.qa import Window, best_span, target_places, trimmed, windows
from lingua.errors import UserError
from lingua.features import load_encoder
from lingua.frozen import FrozenEncoder
from lingua.hashing import counter_hash
from lingua.hf_encoder import load_hf_encoder
from lingua.tokenizer import SentencePieceTokenizer
from tests.tiny_models import make_model
from tests.tiny_run import SENTENCES, make_run, train_sentencepiece

AWKWARD = [
    "👩‍👩‍👧‍👦 family, 🇫🇷 flag, 👍🏽 skin tone, ❤️ heart",
    "na\u0308ive cafe\u0301 A\u030angstrom: e\u0301 is not é",
    "  double  spaces\t\ttabs \u00a0 no-break\u3000ideographic   ",
    "漢字かな交じり文、한국어 문장과 中文。全角ＡＢＣ１２３",
    "x" * 90 + " Donaudampfschifffahrtsgesellschaftskapitänsmütze " + "y" * 30,
    "العربية עברית हिन्दी ไทย",
    "$3.50 (1999), one-third; `` state-of-the-art '' ½ ﬁn … I'll",
    "\u2028line\u2029paragraph \r\n end",
]
QUESTION = "Where is the fox ?"
OURS = ["sentencepiece", "roberta", "bytes"]
KINDS = [*OURS, "hf-bert", "hf-roberta", "hf-deberta-v3"]
LENGTHS = {"bytes": 60}


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FrozenEncoder]:
    folder = tmp_path_factory.mktemp("encoders")
    pieces = train_sentencepiece(folder / "pieces")
    sizes = {"sentencepiece": SentencePieceTokenizer(str(pieces)).vocab_size, "roberta": 50_265, "bytes": 261}
    found: dict[str, FrozenEncoder] = {}
    for kind in OURS:
        tokenizer = {"name": kind} | ({"path": str(pieces)} if kind == "sentencepiece" else {})
        run = make_run(folder / kind, tokenizer, sizes[kind], dim=4, n_layers=1)
        found[kind] = load_encoder(run, max_length=LENGTHS.get(kind, 40), device="cpu")
    for kind in KINDS[len(OURS) :]:
        model = make_model(folder / kind, kind.removeprefix("hf-"))
        found[kind] = load_hf_encoder(str(model), max_length=60, device="cpu")
    return found


def answer_of(window: Window, text: str, answer: tuple[int, int]) -> str | None:
    """What comes back of an answer: to its places, to scores that say just those, to characters."""
    places = target_places(window, answer)
    if places[0] == 0:
        return None
    scores_P2 = np.full((len(window.places), 2), -5.0)
    scores_P2[places[0], 0] = scores_P2[places[1], 1] = 5.0
    _, span = best_span(window, scores_P2, max_answer=1000)
    return text[slice(*span)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_character_and_word_comes_back(encoders: dict[str, FrozenEncoder], kind: str) -> None:
    encoder, args = encoders[kind], QaArgs(stride=10)
    for text in [*AWKWARD, *SENTENCES]:
        found = windows(encoder, QUESTION, text, args)
        covered = {i for window in found for begin, end in window.spans for i in range(begin, end)}
        for i, letter in enumerate(text):
            if letter.isspace():
                continue
            backs = [back for window in found if (back := answer_of(window, text, (i, i + 1))) is not None]
            # Normalization may drop a mark or a joiner, but no letter or digit.
            assert backs or (i not in covered and not letter.isalnum()), (text, i, letter)
            assert all(letter in back for back in backs)
            if kind == "bytes":
                assert set(backs) == {letter}
        at = 0
        for word in text.split():
            at = text.index(word, at)
            backs = [back for w in found if (back := answer_of(w, text, (at, at + len(word)))) is not None]
            fits = len(word) < 20 and kind not in ("hf-bert", "bytes")
            if fits and word.isalnum():
                assert set(backs) == {word}, (text, word)
            at += len(word)


@pytest.mark.parametrize("kind", KINDS)
def test_windows_share_tokens_and_miss_none(encoders: dict[str, FrozenEncoder], kind: str) -> None:
    encoder = encoders[kind]
    text = " ".join(SENTENCES * 3)
    found = windows(encoder, QUESTION, text, QaArgs(stride=7))
    assert len(found) > 5
    assert all(len(w.ids) <= encoder.max_length and len(w.places) == len(w.spans) + 1 for w in found)
    assert all(len(w.ids) == encoder.max_length for w in found[:-1])
    (whole,) = windows(_longer(encoder, 4000), QUESTION, text, QaArgs(stride=7))
    for number, window in enumerate(found):
        start = 7 * number
        count = len(window.spans)
        np.testing.assert_array_equal(window.spans, whole.spans[start : start + count])
        np.testing.assert_array_equal(window.ids[window.places[1:]], whole.ids[whole.places[1:]][start : start + count])
    assert start + count == len(whole.spans)
    # A question with its paragraph is what a pair of texts is.
    short = SENTENCES[0][:12]
    (window,) = windows(encoder, QUESTION, short, QaArgs())
    pair = encoder.text_sequences([QUESTION], [short])
    np.testing.assert_array_equal(window.ids, pair.ids[0])
    if pair.types is not None:
        np.testing.assert_array_equal(window.types, pair.types[0])


def _longer(encoder: FrozenEncoder, length: int) -> FrozenEncoder:
    import copy

    other = copy.copy(encoder)
    other.max_length = length
    return other


@pytest.mark.parametrize("kind", ["sentencepiece", "hf-bert"])
def test_long_questions_are_cut_and_too_long_ones_refused(encoders: dict[str, FrozenEncoder], kind: str) -> None:
    encoder = encoders[kind]
    long = " ".join(SENTENCES * 4)
    (whole,) = windows(_longer(encoder, 4000), long, "a river", QaArgs(max_question=9))
    before = whole.places[1] - (3 if kind == "sentencepiece" else 2)  # specials
    assert before <= 9
    assert before >= 8
    with pytest.raises(UserError, match="leave no room for a paragraph; raise it or"):
        windows(encoder, long, "a river", QaArgs(max_question=300))


def test_an_answer_beyond_the_window_is_no_answer(encoders: dict[str, FrozenEncoder]) -> None:
    text = " ".join(SENTENCES)
    first, *_, last = windows(encoders["roberta"], QUESTION, text, QaArgs(stride=20))
    at = text.index("small boats")
    assert target_places(first, (at, at + 11)).tolist() == [0, 0]
    assert answer_of(last, text, (at, at + 11)) == "small boats"
    edge = first.spans[-1]  # half inside
    assert target_places(first, (edge[0], edge[1] + 4)).tolist() == [0, 0]
    assert target_places(first, None).tolist() == [0, 0]


def test_the_best_span_is_that_of_all_pairs() -> None:
    for seed in range(60):
        count = 1 + counter_hash(seed) % 9
        begin_end = np.array([[i * 3, i * 3 + counter_hash(seed, i) % 3] for i in range(count)])  # some are empty
        window = Window(np.empty(0), None, np.arange(count + 1), begin_end)
        scores = np.array([[counter_hash(seed, i, j) % 1000 / 100 for j in range(2)] for i in range(count + 1)])
        longest = 1 + counter_hash(seed, 7) % 4
        usable = [i for i in range(count) if begin_end[i, 0] < begin_end[i, 1]]
        pairs = [(i, j) for i, j in itertools.product(usable, usable) if i <= j < i + longest]
        value, span = best_span(window, scores, longest)
        if not pairs:
            assert span is None
            continue
        assert value == pytest.approx(max(scores[i + 1, 0] + scores[j + 1, 1] for i, j in pairs))
        i, j = max(pairs, key=lambda pair: scores[pair[0] + 1, 0] + scores[pair[1] + 1, 1])
        assert span == (begin_end[i, 0], begin_end[j, 1])


def test_spaces_are_trimmed() -> None:
    text = " a  bc \u3000"
    spans = np.array([[0, 2], [2, 6], [2, 4], [6, 8], [4, 4]])
    assert trimmed(text, spans).tolist() == [[1, 2], [4, 6], [4, 4], [8, 8], [4, 4]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_word_of_a_sentence_has_a_place(encoders: dict[str, FrozenEncoder], kind: str) -> None:
    """Sub-word alignment: the first token of each word is within it, also where a sentence is cut in several."""
    encoder = encoders[kind]
    sentences = [text.split() for text in [*AWKWARD, " ".join(SENTENCES), "one"]]
    found = whole_sentences(encoder, sentences)
    assert found.places is not None
    assert sum(map(len, found.places)) == sum(map(len, sentences))
    assert len(found.ids) > len(sentences)
    assert 1 <= found.truncated < len(sentences)
    assert all(len(ids) <= encoder.max_length for ids in found.ids)
    decode = encoder.tokenizer.decode
    words = iter(word for words in sentences for word in words)
    for ids, places in zip(found.ids, found.places, strict=True):
        assert (np.diff(places) > 0).all()
        assert 0 < places[0] <= places[-1] < len(ids) - 1
        for place, end in zip(places, [*places[1:], len(ids) - 1], strict=True):
            word, said = next(words), decode(ids[place:end].tolist()).strip()
            if kind in ("bytes", "roberta", "hf-roberta") and end < len(ids) - 1:
                assert said == word
