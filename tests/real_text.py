"""Real English for tests: the descriptions of the installed packages, and what hardly any text has."""

from __future__ import annotations

import importlib.metadata

ODD_TEXTS = [
    "",
    " ",
    "   \t\n \r\n  ",
    "\u00a0no-break\u00a0space\u2003em space\u200bzero width\u3000ideographic",
    "tabs\tand  double  spaces   at the end   ",
    "\x00\x01\x02\x03 control \x7f\x85",
    "漢字かな交じり文、한국어 문장과 中文。",
    "👩‍👩‍👧‍👦 family, 🇫🇷 flag, 👍🏽 skin tone, ❤️ heart",
    "naïve café Ångström: e\u0301 is not é",
    "العربية עברית हिन्दी ไทย",
    "I'll we've it's 'S 'LL can't O'Neill",
    "3.14159 1,000,000 ½ Ⅻ ²",
    "<s> <pad> </s> <unk> <mask> <|endoftext|> madeupword0000",
    "\u017fhort-circuiting\u2028line\u2029paragraph",
    "a" * 5_000,
]


def real_lines(count: int) -> list[str]:
    """``count`` lines of the descriptions of installed packages, in a fixed order."""
    lines: list[str] = []
    for package in sorted(importlib.metadata.distributions(), key=lambda d: d.metadata["Name"].lower()):
        text = package.metadata.get_payload() or package.metadata.get("Description") or ""
        lines += [line for line in str(text).splitlines() if line.strip()]
        if len(lines) >= count:
            return lines[:count]
    raise RuntimeError(f"only {len(lines)} lines of package descriptions are installed, {count} needed")
