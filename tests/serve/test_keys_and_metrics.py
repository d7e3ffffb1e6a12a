"""API keys, and metrics in Prometheus' text form."""

from __future__ import annotations

from pathlib import Path

import pytest

from arpo.errors import ArpoError
from arpo.serve.keys import Keys, build_keys, read_keys
from arpo.serve.metrics import Counter, Histogram, render

ONE, TWO = "sk-" + "a1" * 10, "sk-" + "b2" * 10


def test_one_of_the_keys_is_needed_if_there_are_any() -> None:
    keys = build_keys([ONE, TWO], "here")
    assert keys and all(keys.accept(f"Bearer {key}") for key in (ONE, TWO)) and keys.accept(f"bearer  {ONE} ")
    refused = ("", "Bearer", "Bearer ", f"Bearer {ONE}x", f"Bearer {ONE[:-1]}", f"Basic {ONE}", ONE, "Bearer é\udcff")
    assert not any(map(keys.accept, refused))
    assert not Keys() and Keys().accept("")


def test_keys_are_compared_in_full_every_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr("arpo.serve.keys.hmac.compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    keys = build_keys([ONE, TWO], "here")
    assert keys.accept(f"Bearer {ONE}")
    assert [known for _, known in compared] == list(keys.hashes)


def test_keys_come_from_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARPO_API_KEYS", raising=False)
    assert not read_keys(None)
    monkeypatch.setenv("ARPO_API_KEYS", f" {ONE} ,{TWO},")
    assert read_keys(None) == build_keys([ONE, TWO], "")
    file = tmp_path / "keys.txt"
    file.write_text(f"# mine\n{TWO}\n\n")
    assert read_keys(file) == build_keys([TWO], "")


@pytest.mark.parametrize("content", [b"", b"# none\n", b"short\n", b"two words are no key\n", b"\xff" * 20])
def test_a_file_without_usable_keys_is_refused_and_none_is_shown(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys.txt"
    file.write_bytes(content + f"{ONE}".encode() if content == b"short\n" else content)
    with pytest.raises(ArpoError) as error:
        read_keys(file)
    assert str(file) in str(error.value)
    assert ONE not in str(error.value) and "short" not in str(error.value)
    with pytest.raises(ArpoError, match="cannot be read"):
        read_keys(tmp_path / "none.txt")


def test_keys_are_not_shown() -> None:
    keys = build_keys([ONE], "here")
    assert ONE not in repr(keys) and "hashes" not in repr(keys)
    assert not any(ONE.encode() in known for known in keys.hashes)


def test_metrics_in_text_form() -> None:
    calls = Counter("calls_total", "calls", ("tool", "fault"))
    calls.add("search", "none")
    calls.add("search", "none", count=2)
    calls.add('odd"\\\n', "model")
    seconds = Histogram("seconds", "how long", (0.1, 1.0))
    for value in (0.1, 0.5, 3.0):
        seconds.observe(value)
    assert render([calls, Counter("now", "at once", kind="gauge"), seconds]).decode().splitlines() == [
        "# HELP calls_total calls",
        "# TYPE calls_total counter",
        'calls_total{tool="search",fault="none"} 3',
        'calls_total{tool="odd\\"\\\\\\n",fault="model"} 1',
        "# HELP now at once",
        "# TYPE now gauge",
        "now 0",
        "# HELP seconds how long",
        "# TYPE seconds histogram",
        'seconds_bucket{le="0.1"} 1',
        'seconds_bucket{le="1"} 2',
        'seconds_bucket{le="+Inf"} 3',
        "seconds_sum 3.6000000000000001",
        "seconds_count 3",
    ]
