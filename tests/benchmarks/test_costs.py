import json

import pytest

from benchmarks.costs import costs, duration, size
from lingua.errors import UserError
from tests.support import ROOT


def test_the_page_shows_what_the_recorded_rates_give():
    table = costs(str(ROOT / "docs/results/data.json"))
    assert table in (ROOT / "docs/data.md").read_text()


def test_figures_by_hand(tmp_path):
    """2 million tokens a second: 10 billion tokens take 5,000 s, 16 processes a sixteenth of that."""
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"prepare": {"prepare": [1e6, 2e6, 9e6]}}))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in costs(str(path)).splitlines()]
    # 2 bytes a token and 8 a document of 1,000 tokens; meanwhile 57 a document, and 16 times 0.2 GB and 0.5 GB
    assert rows[2] == ["10 billion", "20 GB", "12 GB", "83.3 min", "5.2 min", "5 s", "4,768"]
    assert rows[4][:5] == ["4 trillion", "8.0 TB", "239 GB", "23.1 days", "34.7 h"]
    assert [duration(seconds) for seconds in (119, 120, 7199, 7200, 172_800)] == [
        "119 s", "2.0 min", "120.0 min", "2.0 h", "2.0 days",
    ]  # fmt: skip
    assert [size(n) for n in (1.6e9, 999e9, 8.03e12)] == ["2 GB", "999 GB", "8.0 TB"]
    with pytest.raises(UserError, match=r"none\.json: no rates of preparation"):
        costs(f"{tmp_path}/none.json")
