"""Which languages prepared documents are in, guessed from the beginning of the first ones of each split.

The documents of a split lie in the order of a hash, so the first are a uniform sample, the same whatever the workers,
machines and interruptions. The guesses are py3langid's (139 languages, a naive Bayes classifier over byte n-grams,
after Lui and Baldwin 2012), whose model comes inside the package.
"""

from __future__ import annotations

import collections
import functools
from typing import Any

import numpy as np

from lingua.files import optional
from lingua.manifest import Manifest
from lingua.tokenizer import Tokenizer

TOKENS, CHARACTERS = 500, 1000  # of a document that are looked at
LEAST_CONFIDENCE = 0.2
UNDETERMINED = "und"  # below it; py3langid itself says "zxx" for what is no language (numbers, markup)


def package() -> Any:
    """py3langid. Raises UserError if it is missing."""
    return optional("py3langid.langid", "telling languages (languages=0: do not)", "requirements.txt")


@functools.lru_cache(maxsize=1)
def _identifier() -> Any:
    langid = package()  # its model takes 0.4 s and 100 MB
    return langid.LanguageIdentifier.from_model_file(
        langid.MODEL_FILE, norm_probs=True, min_confidence=LEAST_CONFIDENCE
    )


def language_statistics(manifest: Manifest, tokenizer: Tokenizer, n: int) -> dict[str, Any]:
    """Languages of the first ``n`` documents of a split.

    Returns:
        ``documents``: how many were looked at; ``shares``: share of them by ISO 639 code, largest first.
    """
    texts = [tokenizer.decode(ids) for ids in _beginnings(manifest, tokenizer, n)]
    counts = collections.Counter(language(text) for text in texts)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return {"documents": len(texts), "shares": {code: round(count / len(texts), 4) for code, count in ordered}}


def language(text: str) -> str:
    """ISO 639 code of a text's language; ``und`` where nothing is likely."""
    text = text[:CHARACTERS].strip()
    return _identifier().classify(text)[0] if text else UNDETERMINED


def _beginnings(manifest: Manifest, tokenizer: Tokenizer, n: int) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    for shard in range(len(manifest.shards)):
        tokens, start = manifest.open_tokens(shard), 0
        for end in manifest.open_docs(shard)[: n - len(found)].tolist():
            ids = np.array(tokens[start : min(end, start + TOKENS)])
            found.append(ids[~np.isin(ids, tokenizer.special_ids)])
            start = end
        if len(found) == n:
            break
    return found


def described(languages: dict[str, Any]) -> str:
    """Languages in a few words, the three largest by name; empty if nothing is known of them."""
    if not languages:
        return ""
    shares = languages["shares"]
    said = [f"{code} {100 * share:.1f} %" for code, share in list(shares.items())[:3]]
    rest = sum(list(shares.values())[3:])
    said += [f"others {100 * rest:.1f} %"] if rest else []
    return f"languages {', '.join(said)} (of {languages['documents']:,} documents)"
