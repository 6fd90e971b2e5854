import io

from lingua import progress
from lingua.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_now_and_then(monkeypatch):
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    out = io.StringIO()
    with Progress("web: tokenizing", 200, "tokens", out) as bar:
        for _ in range(8):
            now += 10
            bar.advance(20, 3000)
    assert out.getvalue().splitlines() == [
        "web: tokenizing: 30 %, 9,000 tokens, 300 tokens/s, 30 s",
        "web: tokenizing: 60 %, 18,000 tokens, 300 tokens/s, 60 s",
        "web: tokenizing: 80 %, 24,000 tokens, 300 tokens/s, 80 s",
    ]


def test_unknown_total(monkeypatch):
    monkeypatch.setattr(progress.time, "monotonic", lambda: 5.0)
    out = io.StringIO()
    with Progress("x", None, "tokens", out) as bar:
        bar.advance(20, 0)
    assert out.getvalue() == "x: 0 tokens, 0 tokens/s, 0 s\n"


def test_a_bar_on_a_terminal():
    out = Terminal()
    with Progress("web", 10, "tokens", out) as bar:
        bar.advance(10, 500)
    assert "100%" in out.getvalue()
    assert "web: 100 %, 500 tokens, " in out.getvalue().splitlines()[-1]
