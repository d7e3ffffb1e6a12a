"""Masks what may be secret in settings, wherever they are printed, stored or exported.

    masked("https://me:pw@host/retrieve?key=4711")  # https://(masked)@host/retrieve?key=(masked)

Of every URL in any text, these are masked: user name and password, the values in the query, except plain words, short
numbers and dates under a name that announces no secret (`index=wiki18`), the fragment, and words of the path that look
like keys. Of MCP servers: all values in `env`; in `args` the values of options, variables and headers with names like
key, token or password, and words that look like keys. In a setting that names an environment variable: whatever cannot
be such a name. A reference to an environment variable, `${NAME}`, is no secret and stays.

Guarantees: masking twice changes nothing. Hosts, paths, and the names of variables, options and query parameters stay,
so that two runs can be compared.
Not covered: secrets in file names, short ones among `args` that no name announces (`-p 4711`), and plain words that are
secrets under another name (`?mode=sesame`).
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

MASK = "(masked)"
USER_NAMED = ("by_kind", "template_arguments")  # tables whose keys the user chooses: these are no names of settings
_NAME = (  # the short words end a part of a name: API_KEY, apiKey and apikey, but neither keyword nor TOKENIZER
    r"(?i:secret|passw|passphrase|credential|authori[sz]|authent|bearer|cookie|signature|header)"
    r"|(?:[Kk]eys?|[Tt]oken|[Aa]uth|[Pp]wd|[Pp]ass)(?![a-z])|(?:KEYS?|TOKEN|AUTH|PWD|PASS)(?![A-Z])"
)
_SECRET_NAME = re.compile(_NAME)
_ASSIGNMENT = re.compile(rf"((?:^|(?<=[\s\"'{{,;=]))[\w.-]*(?:{_NAME})[\w.-]*[\"']?\s*[:=]\s*[\"']?)(.+)", re.DOTALL)
_SECRET_PARAMETER = re.compile(  # also one that says nothing, like `k`
    rf"^.{{0,2}}$|{_NAME}|(?i:user|login|session|licen[cs]e|(?<![a-z])(?:code|pin|otp|jwt|sid|sig)(?![a-z]))", re.DOTALL
)
_URL = re.compile(r"([a-z][a-z0-9+.-]{0,30}://)(.*)", re.IGNORECASE | re.DOTALL)
_URL_IN_MESSAGE = re.compile(r"([a-z][a-z0-9+.-]{0,30}://)([^\s'\"<>]*)", re.IGNORECASE)
_ADDRESS = re.compile(r"(?:url|endpoint|servers|address)$")  # settings that hold a URL, if need be without its scheme
_REFERENCES = re.compile(r"(?:[\w-]+: ?)?(?:(?:Bearer|Basic) )?(?:\$\{[A-Za-z_][A-Za-z0-9_]*\}:?)+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LONG_WORD = re.compile(r"(?!(?<=@sha256:)[0-9a-f]{64}(?![A-Za-z0-9_+=-]))(?<![A-Za-z0-9_+=-])[A-Za-z0-9_+=-]{20,}")
_REGULAR = re.compile(  # where letters of words, numbers and single letters are: getUser, XMLFile, v2
    r"[A-Z]?[a-z]{2,}|[A-Z]+(?![a-z])|\d+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|[^A-Za-z0-9]"
)
_DATE = r"(?<!\d)(?:19|20)\d\d(?:(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])?)?(?!\d)"
_WORD = r"(?:[A-Za-z][a-z]{2,10}|[A-Z]{3,11})"
_PLAIN = re.compile(rf"(?!.{{12}})(?:\d{{1,8}}|[A-Za-z]{{1,2}}\d{{0,2}}|(?:{_WORD}\d{{1,2}})?{_WORD}\d{{0,2}})?")


def masked(values: Any, name: str = "") -> Any:
    """Settings, or the value of the setting `name`, as lists, tables and texts without secrets."""
    if name == "env":
        return {key: _mask(text) for key, text in values.items()} if isinstance(values, Mapping) else MASK
    if name == "args":
        return _mask_args(values) if _is_list(values) else MASK
    if isinstance(values, Mapping):
        return {key: masked(value, "" if name in USER_NAMED else key) for key, value in values.items()}
    if _is_list(values):
        return type(values)(masked(value, name) for value in values)
    if not isinstance(values, str):
        return values
    if name.endswith("_env"):
        return values if is_variable_name(values) else MASK
    if _ADDRESS.search(name) and not _URL.search(values):
        return _mask_address("", values)
    return _URL.sub(_mask_url, values)


def mask_message(text: str) -> str:
    """A message in which every URL is masked."""
    return _URL_IN_MESSAGE.sub(_mask_url, text)


def is_variable_name(text: str) -> bool:
    """Whether a text can name an environment variable; a key can not."""
    return _VARIABLE.fullmatch(text) is not None and _mask_words(text) == text


def has_mask(values: Any) -> bool:
    """Whether something in these settings was masked."""
    if isinstance(values, Mapping):
        return any(map(has_mask, values.values()))
    if _is_list(values):
        return any(map(has_mask, values))
    return isinstance(values, str) and MASK in values


def secrets_in(values: Mapping[str, Any]) -> set[str]:
    """What `masked` masks, as far as it can be looked for: 12 characters or more, or 8 with letters and digits, since
    ordinary words occur in texts. Of `env` what has such a name or looks like a key, because other variables hold paths
    and modes."""
    found: set[str] = set()
    for key, value in values.items():
        if key == "env":
            found.update(text for name, text in value.items() if _SECRET_NAME.search(name) or _mask_words(text) != text)
            continue
        before, after = (given if _is_list(given) else [given] for given in (value, masked(value, key)))
        for text, hidden in zip(before, after, strict=True):
            if isinstance(text, str) and MASK in hidden:
                groups = re.fullmatch("(.+?)".join(map(re.escape, hidden.split(MASK))), text, re.DOTALL)
                found.update(groups.groups() if groups else [text])
    found |= {text.rpartition(":")[2].rpartition(" ")[2] for text in found}  # of user:password, and of Bearer TOKEN
    found |= set(map(unquote, found))
    basic = (text if ":" in text else f"{text}:" for text in found)  # in the header of Basic authentication
    found |= {b64encode(text.encode(errors="replace")).decode() for text in basic}
    return {text for text in found if len(text) >= 12 or re.fullmatch(r"(?=.*[^\W\d])(?=.*\d).{8,}", text)}


def hide(text: str, secrets: Iterable[str]) -> str:
    """A message of someone else without these secrets."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _mask(text: Any) -> str:
    if not isinstance(text, str):
        return f"{MASK} {type(text).__name__}"  # a mistake, and its type is the reason
    return text if not text or _REFERENCES.fullmatch(text) else MASK


def _mask_words(text: str) -> str:
    """The text with a mask for each word that looks like a key: long, with a long part of letters and digits other than
    plain words around a date, or with capitals where no word has them."""

    def mask(word: re.Match[str]) -> str:
        parts = [part for part in re.split(r"[^A-Za-z0-9]", word[0]) if len(part) >= 12 and not part.isdigit()]
        mixed = [part for part in parts if len(re.findall(r"\d", part)) >= 2 and not _is_plain(part)]
        return MASK if mixed or len(_REGULAR.sub("", word[0])) >= 3 else word[0]

    return _LONG_WORD.sub(mask, text)


def _mask_url(url: re.Match[str]) -> str:
    return _mask_address(url[1], url[2])


def _mask_address(scheme: str, rest: str) -> str:
    location, hash_sign, fragment = rest.partition("#")
    location, question_mark, query = location.partition("?")
    authority, slash, path = location.partition("/")
    user, at, host = authority.rpartition("@")
    _, colon, port = host.rpartition("]")[2].partition(":")
    unquoted = "@" in rest[len(authority) :]  # a password with a character that ends the authority
    if colon and not at and (unquoted or not re.fullmatch(r"\d*\W*", port)):
        return scheme + MASK
    parameters = (parameter.partition("=") for parameter in query.split("&"))
    masked_query = "&".join(
        f"{name}={_mask_parameter(name, value)}" if equals else _mask(name) for name, equals, value in parameters
    )
    shown_path = slash + _mask_words(path)
    return f"{scheme}{_mask(user)}{at}{host}{shown_path}{question_mark}{masked_query}{hash_sign}{_mask(fragment)}"


def _is_plain(text: str) -> bool:
    """Whether a text is made of words, short numbers and dates."""
    return len(text) <= 40 and all(map(_PLAIN.fullmatch, re.split(rf"[-_.,/]|{_DATE}", text)))


def _mask_parameter(name: str, value: str) -> str:
    return value if _is_plain(value) and not _SECRET_PARAMETER.search(name) else _mask(value)


def _mask_args(args: Sequence[Any]) -> list[Any] | tuple[Any, ...]:
    """The arguments of a program without secrets."""
    shown, option = [], ""
    for arg in args:
        if not isinstance(arg, str) or (option and _SECRET_NAME.search(option)):
            shown.append(_mask(arg))
        elif (found := _ASSIGNMENT.search(arg)) is not None:
            shown.append(arg[: found.start(2)] + _mask(found[2]))
        else:
            url = _URL.search(arg)
            shown.append(_mask_words(arg[: url.start()]) + _mask_url(url) if url else _mask_words(arg))
        option = arg if isinstance(arg, str) and arg.startswith("-") and not re.search("[:=]", arg) else ""
    return tuple(shown) if isinstance(args, tuple) else shown
