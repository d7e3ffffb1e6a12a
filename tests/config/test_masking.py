"""Secrets in settings: what is masked, in every setting that there is, and what stays readable."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import pytest

from arpo.config.loading import (
    _settings,
    config_from_resolved,
    differences,
    load_config,
    mask_override,
)
from arpo.config.masking import MASK, USER_NAMED, hide, mask_message, masked, secrets_in
from arpo.config.schema import Config, Mcp, Rewards
from arpo.errors import ArpoError
from arpo.net.keys import expand_variables, read_api_key

CANARY = "kanarie4711"
URL = f"https://me:{CANARY}@host:81/path?api_key={CANARY}&x={CANARY}#{CANARY}"
SHOWN = "https://(masked)@host:81/path?api_key=(masked)&x=(masked)#(masked)"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (URL, SHOWN),
        (SHOWN, SHOWN),
        ("http://localhost:8000/v1/", "http://localhost:8000/v1/"),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1"),
        ("https://token@host/@scope/x", "https://(masked)@host/@scope/x"),
        ("http://me:pass/word@host/x", "http://(masked)"),
        ("http://me:12/34@host/x", "http://(masked)"),
        ("http://me:pass?word@host/x", "http://(masked)"),
        ("http://me:pass word@host/x", "http://(masked)@host/x"),
        ("https://host/s/NGQ1ZjYzNmYtOWI0Zi00MDc5LWE/mcp", "https://host/s/(masked)/mcp"),
        ("https://host/s/0b5c1f6e-7d1a-4f1e-9a3b-1c2d3e4f5a6b/mcp", "https://host/s/(masked)/mcp"),
        (
            "https://host/models/meta-llama--Llama-3.1-8B-Instruct",
            "https://host/models/meta-llama--Llama-3.1-8B-Instruct",
        ),
        ("https://host/indexes/wiki18dump20230401v2", "https://host/indexes/wiki18dump20230401v2"),
        ("https://host/wikipedia2023embeddings/retrieve", "https://host/wikipedia2023embeddings/retrieve"),
        ("https://host/s/0b5c1f6e-7d1a-4f1e-9a3b-1c2d2019a5b6/mcp", "https://host/s/(masked)/mcp"),
        ("https://host/s/QwErTzUiOpAsDfGhJkLy/mcp", "https://host/s/(masked)/mcp"),
        (
            "https://host/getMcpToolsForXMLUsers-e5-m3-v2-f16-Q4_K_M",
            "https://host/getMcpToolsForXMLUsers-e5-m3-v2-f16-Q4_K_M",
        ),
        ("https://host/s/wiki18dump20230401x7k2m9q4w8z1", "https://host/s/(masked)"),
        ("https://host/r?index=wiki18&lang=en&top=20", "https://host/r?index=wiki18&lang=en&top=20"),
        (
            "https://host/r?index=wiki18dump20230401v2&model=e5-base-v2",
            "https://host/r?index=wiki18dump20230401v2&model=e5-base-v2",
        ),
        ("https://host/r?day=2023-04-01&k=v&code=ab12", "https://host/r?day=2023-04-01&k=(masked)&code=(masked)"),
        ("https://host/r?index=qwertzuiopasdfgh", "https://host/r?index=(masked)"),
        ("https://host/r?index=JBSWYDPE3HPKPXPA", "https://host/r?index=(masked)"),
        (
            "https://host/r?exaApiKey=abc&apikey=abc&pass=abc",
            "https://host/r?exaApiKey=(masked)&apikey=(masked)&pass=(masked)",
        ),
        ("https://host/?key", "https://host/?(masked)"),
        ("https://${USER}:${PASS}@host/?key=${KEY}", "https://${USER}:${PASS}@host/?key=${KEY}"),
        ("https://host/?key=${KEY}tail", "https://host/?key=(masked)"),
        ("postgresql://me:pw@host/db", "postgresql://(masked)@host/db"),
        ("data/tasks.jsonl", "data/tasks.jsonl"),
        ("hf:name:config:split", "hf:name:config:split"),
    ],
)
def test_of_a_url_host_and_path_stay(url: str, shown: str) -> None:
    assert masked(url) == masked(shown) == shown


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["-y", "server-files", "/data/files"], ["-y", "server-files", "/data/files"]),
        (["--token", "abc", "on"], ["--token", "(masked)", "on"]),
        (["--api-key=abc", "--max-tokens", "512"], ["--api-key=(masked)", "--max-tokens", "512"]),
        (["--header", "X-Mine: abc"], ["--header", "(masked)"]),
        (["-H", "Authorization: Bearer abc"], ["-H", "Authorization: (masked)"]),
        (["--header", "Authorization: Bearer ${KEY}"], ["--header", "Authorization: Bearer ${KEY}"]),
        (["-e", "API_KEY=abc", "--env=PASSWORD=abc"], ["-e", "API_KEY=(masked)", "--env=PASSWORD=(masked)"]),
        (["-e", "API_KEY", "image"], ["-e", "API_KEY", "image"]),
        (['{"token": "abc", "mode": 1}'], ['{"token": "(masked)']),
        (["--url=https://my-auth.host:80/x?k=v"], ["--url=https://my-auth.host:80/x?k=(masked)"]),
        (["sk-proj-abcDEF1234567890abcd"], ["(masked)"]),
        (["--key", "${KEY}"], ["--key", "${KEY}"]),
        (["--tokenizer", "abc", "--author=me", "keyword=abc"], ["--tokenizer", "abc", "--author=me", "keyword=abc"]),
        (["-e", "TOKENIZER=abc", "AUTHOR=me"], ["-e", "TOKENIZER=abc", "AUTHOR=me"]),
        (
            ["--apiKey=abc", "--accesskey", "abc", "PGPASSWORD=abc"],
            ["--apiKey=(masked)", "--accesskey", "(masked)", "PGPASSWORD=(masked)"],
        ),
        (
            ["authToken=abc", "OAUTH=abc", "KEY1=abc", "DB_PASS=a"],
            ["authToken=(masked)", "OAUTH=(masked)", "KEY1=(masked)", "DB_PASS=(masked)"],
        ),
        ([f"ghcr.io/a/b@sha256:{'0a' * 32}"], [f"ghcr.io/a/b@sha256:{'0a' * 32}"]),
        ([f"ghcr.io/a/b@sha256:{'0a' * 32}-x", f"x:{'0a' * 32}"], ["ghcr.io/a/b@sha256:(masked)", "x:(masked)"]),
    ],
)
def test_of_arguments_what_a_name_or_its_look_calls_a_key_is_masked(args: list[str], shown: list[str]) -> None:
    assert masked({"args": args}) == masked({"args": shown}) == {"args": shown}


def test_names_that_the_user_chooses_are_no_names_of_settings() -> None:
    tables = {key.rpartition(".")[2] for key, schema in _settings().items() if schema.get("type") == "object"}
    assert tables == {"env", "settings", *USER_NAMED}  # an environment may well have a setting `api_key`
    given = [f"reward.by_kind.{name}=em" for name in ("env", "args", "url", "my_env", "address")]
    config = load_config(None, given)
    assert config.resolved() == config.resolved(reveal=True) and MASK not in repr(config)
    assert config_from_resolved(config.resolved(), allow_masked=False) == config
    assert [*map(mask_override, given)] == given
    assert CANARY not in mask_override(f"reward.by_kind.env={URL}")


def test_a_change_of_what_is_no_secret_is_noticed() -> None:
    def search(url: str) -> dict[str, Any]:
        return load_config(None, [f"tools.search={url}"]).resolved()

    for old, new in [("r?index=wiki18", "r?index=wiki21"), ("wiki18dump20230401v2/r", "wiki18dump20230601v2/r")]:
        assert differences(search(f"http://h/{old}&key={CANARY}"), search(f"http://h/{new}&key={CANARY}"))
    assert not differences(search(f"http://h/r?index=a&key={CANARY}"), search("http://h/r?index=a&key=rotated0815"))


def every_text_setting() -> list[str]:
    """The settings that hold texts, in whatever form."""
    return [key for key, schema in _settings().items() if '"string"' in json.dumps(schema) and "enum" not in schema]


def given_as_toml(key: str) -> str:
    """An override with the canary in a setting: as a URL, in a list or a table."""
    schema = _settings()[key]
    kind = schema.get("type")
    value = f'["--token", "{CANARY}", "{URL}"]' if key.endswith("args") else f'["{URL}"]' if kind == "array" else None
    value = value or (f'{{A = "{CANARY}"}}' if key.endswith("env") and kind == "object" else None)
    value = value or (f'{{A = "{URL}"}}' if kind == "object" else f'"{URL}"')
    parent, _, name = key.rpartition(".")
    if parent not in _settings():
        return f"{key}={value}"
    required = {"tools.mcp": 'command = "x"', "data.mix": 'source = "x"'}[parent]
    rest = "" if required.startswith(f"{name} ") or name == "url" else f", {required}"
    return f"{parent}=[{{{name} = {value}{rest}}}]"


@pytest.mark.parametrize("key", every_text_setting())
def test_no_setting_shows_a_secret(key: str) -> None:
    override = given_as_toml(key)
    assert CANARY not in mask_override(override)
    try:
        config = load_config(None, [override])
    except ArpoError as error:  # a setting that takes only some texts
        assert key in str(error) and CANARY not in str(error)
        return
    revealed = json.dumps(config.resolved(reveal=True))
    assert CANARY in revealed
    assert config_from_resolved(json.loads(revealed)) == config  # what a worker gets
    shown = [json.dumps(config.resolved()), config.model_dump_json(), repr(config), f"{config} {config.model_dump()}"]
    shown += differences(Config().resolved(), config.resolved(reveal=True))
    assert CANARY not in "".join(shown) and all(MASK in text for text in shown[:4])
    rotated = load_config(None, [override.replace(CANARY, "rotated0815")])
    assert not differences(config.resolved(), rotated.resolved())
    assert not differences(config.resolved(reveal=True), rotated.resolved())  # an old version saved them
    if "host" in override and not key.endswith(("_env", ".env")):
        moved = load_config(None, [override.replace("host", "elsewhere")])
        assert differences(config.resolved(), moved.resolved())


def test_every_setting_of_the_schema_was_tried() -> None:
    tried = every_text_setting()
    assert {"tools.search", "reward.judge_url", "rollout.servers", "tools.mcp.env", "cluster.address"} <= set(tried)
    assert not [key for key in tried if key.endswith(("key", "token", "password", "secret"))]  # such belong into *_env


def test_a_wrong_value_or_name_is_not_repeated_in_the_message(tmp_path: Any) -> None:
    wrong = [
        f'reward.judge_key="{CANARY}"', f'tools.mcp=[{{command = "x", headers = {{A = "{CANARY}"}}}}]',
        f'tools.mcp=[{{command = "x", url = "http://host?k={CANARY}", env = {{A = "{CANARY}"}}}}]',
        f'tools.mcp.env.KEY="{CANARY}"', f'tools.mcp=[{{command = "x", env = "KEY={CANARY}"}}]',
        f'tools.mcp=[{{command = "x", args = "--token={CANARY}"}}]', f"train.steps={URL}", f"preset={URL}", URL,
    ]  # fmt: skip
    for override in wrong:
        with pytest.raises(ArpoError) as error:
            load_config(None, [override])
        assert CANARY not in str(error.value), override
    with pytest.raises(ValueError) as invalid:
        Mcp(command="x", args=CANARY, env={"A": 3, "B": CANARY})  # type: ignore[arg-type, dict-item]
    assert CANARY not in str(invalid.value)


def test_a_key_in_place_of_the_name_of_its_variable() -> None:
    for key in ("sk-proj-1234", "ghp_16C7e42F292c6912E7710c838347Ae178B4a"):
        assert key not in repr(Rewards(judge_key_env=key))
        with pytest.raises(
            ArpoError, match="expected the name of an environment variable that holds the key, not"
        ) as e:
            read_api_key(key, "reward.judge_key_env")
        assert key not in str(e.value)
    assert Rewards(judge_key_env="JUDGE_KEY").model_dump()["judge_key_env"] == "JUDGE_KEY"


def test_a_masked_setting_must_be_given_again(tmp_path: Any) -> None:
    given = [f"tools.search={URL}", f'tools.mcp=[{{command = "x", env = {{KEY = "{CANARY}"}}}}]']
    saved = tmp_path / "config.json"
    saved.write_text(json.dumps(load_config(None, given).resolved()))
    with pytest.raises(ArpoError) as error:
        load_config(saved)
    lines = str(error.value).splitlines()
    assert [line.split(": ")[:3] for line in lines] == [
        [str(saved), "tools.search", "secrets are not saved with a run; give this setting again in a settings file, "
         "with ${NAME} in place of the secret, which is read from the environment variable NAME and need not be given "
         "again"],
        [str(saved), "tools.mcp", lines[0].split(": ")[2]],
    ]  # fmt: skip
    assert load_config(saved, given) == load_config(None, given)
    assert load_config(saved, allow_masked=True).tools.search == SHOWN


def test_a_reference_to_a_variable_is_saved_and_needs_not_be_given_again(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ['tools.mcp=[{command = "x", args = ["--token", "${KEY}"], env = {KEY = "${KEY}"}}]']
    saved = tmp_path / "config.json"
    saved.write_text(json.dumps(load_config(None, given).resolved()))
    assert load_config(saved) == load_config(None, given)
    monkeypatch.setenv("KEY", CANARY)
    assert expand_variables("Bearer ${KEY}, $KEY, ${}", "a.b") == f"Bearer {CANARY}, $KEY, ${{}}"
    monkeypatch.delenv("KEY")
    expected = r"^a\.b: the environment variable KEY is not set; set it, or write \$\${KEY} for a literal \${KEY}$"
    with pytest.raises(ArpoError, match=expected):
        expand_variables("${KEY}", "a.b")
    assert expand_variables("KEY=3; exec srv $${KEY} $${", "a.b") == "KEY=3; exec srv ${KEY} ${"
    monkeypatch.setenv("KEY", "two words\nand ä line")
    assert expand_variables("-c ${KEY}", "a.b", only_keys=False) == "-c two words\nand ä line"
    with pytest.raises(ArpoError, match="holds characters that no key has"):
        expand_variables("http://host/?key=${KEY}", "a.b")


def test_known_secrets_are_hidden_in_the_words_of_others() -> None:
    server = {"url": URL, "args": ["--token", "a key to ken"]}
    server["env"] = {
        "KEY": "value123",
        "DIR": "/data/files",
        "N": "1",
        "DB_PASSWORD": "postgres",
        "AUTHOR": "me and you too",
    }
    found = secrets_in(server)
    assert {f"me:{CANARY}", CANARY, "a key to ken", "value123"} <= found
    text = f"no {CANARY} for value123 in /data/files 1, a key to ken of me and you too: postgres"
    assert hide(text, found) == "no (masked) for (masked) in /data/files 1, (masked) of me and you too: postgres"
    basic = b64encode(f"me:{CANARY}".encode()).decode()
    assert hide(f"Authorization: Basic {basic}", found) == "Authorization: Basic (masked)"
    assert mask_message(f"GET {URL}, http://localhost:80.") == f"GET {SHOWN} http://localhost:80."


def test_overrides_are_masked_as_settings_are() -> None:
    assert mask_override("train.steps=5") == "train.steps=5"
    assert mask_override("--resume") == "--resume"
    assert mask_override("reward.judge_key_env=sk-proj-1234") == "reward.judge_key_env=(masked)"
    assert mask_override("run.toml") == "run.toml"
    assert mask_override(f"--endpoint={URL}") == f"--endpoint={SHOWN}"
    shown = mask_override(f'tools.mcp=[{{command = "x", env = {{KEY = "{CANARY}"}}}}]')
    assert json.loads(shown.partition("=")[2]) == [{"command": "x", "env": {"KEY": MASK}}]
