"""The settings of what comes from outside: questions, the built-in world, tools. Part of `settings`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

Text = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[Text, ...], Field(strict=False)]  # TOML and JSON have lists, no tuples
NoneWord = BeforeValidator(lambda value: None if value == "none" else value)  # TOML has no null
MAX_SEED = 2**32 - 1  # what every random generator in use accepts


class Section(BaseModel):
    """What all sections share: they are frozen, and know every name in them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @staticmethod
    def at_most(value: int, info: ValidationInfo, section: str, other: str) -> int:
        """The value, if it is no larger than another setting of the section."""
        limit = info.data.get(other, value)  # absent if it is wrong itself
        if value > limit:
            text = f"at most {section}.{other}, which is {limit}"
            raise PydanticCustomError("conflict", "{text}", {"text": text, "other": (section, other)})
        return value


class _Columns(Section):
    """Which column of a row holds what; dots lead to what lies inside one (reward_model.ground_truth)."""

    question: Annotated[Text | None, NoneWord] = Field(
        default=None,
        description="column that holds the question, a text or a list of messages; none: question, problem or prompt",
    )
    answer: Annotated[Text | None, NoneWord] = Field(
        default=None,
        description="column that holds the right answer or a list of them; none: answer or reward_model.ground_truth",
    )
    id: Annotated[Text | None, NoneWord] = Field(
        default=None, description="column that names the question; none: id, or else file and line"
    )
    kind: Annotated[Text | None, NoneWord] = Field(
        default=None, description="column by which accuracy is told apart; none: kind or ability, where there is one"
    )
    answer_after: Annotated[Text | None, NoneWord] = Field(
        default=None, description='the answer is what follows the last of these marks, like "####"; none: all of it'
    )


class Mix(_Columns):
    """One source of training questions among several."""

    source: Text = Field(description="what data.train may be")
    weight: int = Field(default=1, ge=1, le=10_000, description="its share of the questions, against the other weights")


class Data(_Columns):
    """The questions."""

    train: Annotated[Text | None, NoneWord] = Field(
        default=None,
        description='training questions: a .jsonl, .json or .parquet file, "hf:NAME:CONFIG:SPLIT" or "world"; none: '
        "the mix, or the world where there is none",
    )
    test: Annotated[Text | None, NoneWord] = Field(
        default=None, description="held-out questions, likewise; none: the world's if the training questions are"
    )
    mix: Annotated[tuple[Mix, ...], Field(strict=False)] = Field(
        default=(), description="training questions from several sources, one [[data.mix]] table each"
    )
    bad_rows: Literal["refuse", "skip"] = Field(
        default="refuse", description="rows that are no question with an answer stop the run, or are left out"
    )
    max_prompt_tokens: Annotated[Annotated[int, Field(ge=1)] | None, NoneWord] = Field(
        default=None, description="training questions whose prompt is longer are left out; none: all must fit the model"
    )
    curriculum: int = Field(
        default=0,
        ge=0,
        description="questions whose last so many visits were all right, or all wrong, come up in every fourth pass "
        "only; 0: all in every pass",
    )

    @field_validator("mix")
    @classmethod
    def _mix_or_train(cls, value: tuple[Mix, ...], info: ValidationInfo) -> tuple[Mix, ...]:
        if value and info.data.get("train") is not None:
            text = "no tables where data.train is set"
            raise PydanticCustomError("conflict", "{text}", {"text": text, "other": ("data", "train")})
        return value

    @property
    def training(self) -> tuple[Mix, ...]:
        """The sources of the training questions; a single one is a mixture too."""
        return self.mix or (Mix(source=self.train or "world", **{name: getattr(self, name) for name in COLUMNS}),)


COLUMNS = tuple(_Columns.model_fields)


class World(Section):
    """The built-in generated world."""

    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="decides the whole world")
    entities: int = Field(default=1000, ge=60, le=2000, description="people, places and things in it")
    train_questions: int = Field(default=2000, ge=1, description="questions to train on")
    test_questions: int = Field(default=300, ge=1, description="questions held out for evaluation")
    difficulty: float = Field(default=0.5, ge=0, le=1, description="how flawed the traces are, how many hops are asked")


class Mcp(Section):
    """One MCP server whose tools the model may call: a command to start, or a URL."""

    command: Annotated[Text | None, NoneWord] = Field(default=None, description="program that speaks MCP over stdio")
    args: Names = Field(default=(), description="its arguments")
    env: dict[str, str] = Field(default={}, description="environment variables it gets besides the usual ones")
    url: Annotated[Text | None, NoneWord] = Field(default=None, description="server that speaks streamable HTTP")
    token_env: Annotated[Text | None, NoneWord] = Field(
        default=None, description="environment variable that holds the bearer token for the URL"
    )
    only: Names = Field(default=(), description="its tools that are used; empty: all")

    @model_validator(mode="after")
    def _one_way(self) -> Mcp:
        if (self.command is None) == (self.url is None):
            raise PydanticCustomError("one_way", "either command or url")
        return self


class Tools(Section):
    """What the model may call."""

    enabled: Names = Field(
        default=("search", "python"),
        description="tools the model is told of: search, python, browse, or your own as path/to/file.py:name; MCP "
        "tools are too",
    )
    search: Annotated[Text | None, NoneWord] = Field(
        default=None,
        description="where search looks: a file of documents, an index folder, the URL of a /retrieve server, or "
        "serper, tavily, brave; none: the world's documents",
    )
    search_mode: Literal["bm25", "dense", "hybrid"] = Field(
        default="bm25", description="how an index folder is searched; dense and hybrid need one built with --dense"
    )
    search_results: int = Field(default=2, ge=1, description="documents in one search result")
    timeout: float = Field(default=10.0, gt=0, description="seconds one call may take")
    result_tokens: int = Field(default=512, ge=1, description="longer results are cut to this many tokens")
    python_memory_mb: int = Field(default=512, ge=16, description="memory that one piece of code may use")
    python_blocks: bool = Field(
        default=False, description="wait for each piece of code on the spot: slower, but runs repeat exactly"
    )
    unsafe_no_isolation: bool = Field(
        default=False, description="run model-written code with all your rights where it cannot be isolated"
    )
    browse_url: Annotated[Text | None, NoneWord] = Field(
        default=None, description="OpenAI-compatible endpoint that condenses pages; none: the best paragraphs are kept"
    )
    browse_model: Annotated[Text | None, NoneWord] = Field(default=None, description="model asked at browse_url")
    cache: Annotated[Text | None, NoneWord] = Field(
        default=None, description="file that keeps tools' answers for all runs that name it; none: nothing is kept"
    )
    cache_mode: Literal["on", "record", "replay"] = Field(
        default="on", description="use and fill the cache, make every call anew, or make none: offline and repeatable"
    )
    mcp: Annotated[tuple[Mcp, ...], Field(strict=False)] = Field(
        default=(), description="MCP servers, one [[tools.mcp]] table each"
    )
