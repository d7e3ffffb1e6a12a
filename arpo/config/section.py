"""What sections of settings are made of: the base class, types of values and limits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
)
from pydantic_core import PydanticCustomError

from arpo.config.masking import masked


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise PydanticCustomError("one_way", "text without NUL characters")
    return value


Text = Annotated[str, Field(min_length=1, max_length=100_000), AfterValidator(_without_nul)]
Names = Annotated[tuple[Text, ...], Field(strict=False)]  # TOML and JSON have lists, no tuples
NoneWord = BeforeValidator(lambda value: None if value == "none" else value)  # TOML has no null
OptionalText = Annotated[Text | None, NoneWord]
MAX_SEED = 2**32 - 1  # what every random generator in use accepts
MAX_TREE_TOKENS = 10_000_000  # of a prompt, a trajectory or a probe: ten times the longest context of a model
MAX_BATCH_TOKENS = 100_000_000
MAX_COUNT = 2**31 - 1  # of what takes no memory, where a huge number means: no limit
MAX_SECONDS = 604_800  # a week
MAX_GROUP = 4096  # trajectories of a task
MAX_TRAJECTORIES = 2**18  # of a step: each is a coroutine, and 2**18 of them take about a gigabyte
MAX_FACTOR = 1_000_000  # of coefficients, where more is a slip


def setting(default: Any, description: str, **limits: Any) -> Any:
    """A setting with its default (`...`: required), description and range."""
    return Field(default, description=description, **limits)


class Section(BaseModel):
    """Base of all sections: frozen, strict about types, and unknown names are errors. Secrets are masked in dumps."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        return values if (info.context or {}).get("reveal") else masked(values)

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return [(name, masked(value, name or "")) for name, value in super().__repr_args__()]

    @staticmethod
    def at_most(value: int, info: ValidationInfo, section: str, other: str) -> int:
        """Return the value if it does not exceed another setting of the section, or raise."""
        limit = info.data.get(other, value)  # absent if it is invalid itself
        if value > limit:
            text = f"at most {section}.{other}, which is {limit}"
            raise PydanticCustomError("conflict", "{text}", {"text": text, "other": (section, other)})
        return value
