from __future__ import annotations

import pytest

from lingua.errors import UserError
from lingua.secrets import check_no_secrets


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("https://user:pass-word@host/data", "a user name and password in an address"),
        ("s3://:pass-word@host/data", "a user name and password"),
        ("https://host/a.gz?X-Amz-Signature=pass-word&b=1", "a key in an address"),
        ("https://host/a.gz?v=1&token=pass-word", "a key in an address"),
        ("hf_pass" + "word" * 8, "a Hugging Face token"),
        ("ghp_pass" + "word" * 8, "a GitHub token"),
        ("key AKIAPASSWORD12345678", "an AWS key"),
    ],
)
def test_secrets_are_refused_by_key_and_not_shown(value: str, what: str) -> None:
    for config in ({"data": {"sources": ["ok", value]}}, {"data": {"sources": {value: 1.0}}}):
        with pytest.raises(UserError, match=what) as error:
            check_no_secrets(config)
        assert "data.sources" in str(error.value)
        assert "pass" not in str(error.value).replace("password in an address", "")


def test_values_of_secret_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"dump_dir": "runs/abc-def-ghi-jkl", "steps": 3}
    check_no_secrets(config)
    monkeypatch.setenv("MY_TOKENIZER", "abc-def-ghi-jkl")
    monkeypatch.setenv("HF_TOKEN_PATH", "abc-def-ghi-jkl")
    monkeypatch.setenv("SHORT_TOKEN", "abc")
    check_no_secrets(config)
    monkeypatch.setenv("MY_SECRET", "abc-def-ghi-jkl")
    with pytest.raises(UserError, match=r"dump_dir holds the value of \$MY_SECRET") as error:
        check_no_secrets(config)
    assert "abc" not in str(error.value)


@pytest.mark.parametrize(
    "value",
    ["s3://bucket/a", "https://host:8080/a?page=2", "memory://x/y@z", "runs/token=3", "user@host", "hf_short", "a:b@c"],
)
def test_ordinary_values_pass(value: str) -> None:
    check_no_secrets({"a": {"b": [value, 1, None, True]}})
