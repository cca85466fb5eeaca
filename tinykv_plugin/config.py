"""KVCacheConfig: every setting, where it comes from and what is allowed."""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from .errors import ConfigError
from .units import parse_bytes

ENV_PREFIX = "TINYKV_"
CONFIG_FILE = "tinykv.toml"

_FRACTION = re.compile(r"\s*\d*\.\d+\s*")


class KVCacheConfig(BaseSettings):
    """Settings of one attachment; immutable.

    A value comes from the keyword (or command-line flag ``--kv-<field>``), else from the environment variable
    ``TINYKV_<FIELD>``, else from ``tinykv.toml`` in the working folder, else from the default. Wrong values raise
    :class:`~tinykv_plugin.errors.ConfigError`, which names the field, the value and what is allowed.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        toml_file=CONFIG_FILE,
        frozen=True,
        extra="forbid",
        str_strip_whitespace=True,
        validate_default=False,
    )

    cache: str = Field(
        default="paged",
        min_length=1,
        description='Cache provider: "paged", "dense" (mlx-lm\'s own caches) or the name of a plugin\'s provider.',
    )
    page_size: int = Field(
        default=32,
        ge=1,
        le=1024,
        strict=True,
        description=(
            "Tokens in a page. Half a page per sequence is unused on average, and whole pages are shared. Larger ones "
            "hardly read faster: decode attention of 16 rows of 64 to 8,192 tokens takes 13.5, 13.0, 11.9 and 12.5 ms "
            "with pages of 16, 32, 64 and 128 (a CPU, 8 heads of 128, float32)."
        ),
    )
    memory: int | float | str = Field(
        default=0.5,
        description=(
            'Budget for all pages: "4GiB", "500MB", a number of bytes, or a fraction below 1 of the device\'s '
            "recommended working set (Metal) or of the physical memory (CPU)."
        ),
    )
    max_pages: int | None = Field(
        default=None,
        ge=1,
        strict=True,
        description="Most pages in a cache group, whatever the memory budget would allow. Unset: memory alone decides.",
    )
    attention: str = Field(
        default="auto",
        min_length=1,
        description=(
            'Attention backend: "auto" (the best that supports the layer), "gather", or the name of a plugin\'s '
            'backend such as "cpu" or "metal".'
        ),
    )
    bits: Literal[4, 5, 6, 8] | None = Field(
        default=None,
        description=(
            "Bits of an element of K and V in the pages, in mlx's affine quantization. Unset: the model's own dtype. "
            "Also mlx-lm's own flag of that name."
        ),
    )
    key_bits: Literal[4, 5, 6, 8] | None = Field(default=None, description="Bits of keys, if not those of bits.")
    value_bits: Literal[4, 5, 6, 8] | None = Field(default=None, description="Bits of values, if not those of bits.")
    group_size: Literal[32, 64, 128] | None = Field(
        default=None,
        description=(
            "Elements of a quantized head that share a scale and a bias. "
            "Unset: 64, or 32 where that divides the head dim and 64 doesn't."
        ),
    )
    quantized_start: int = Field(
        default=0,
        ge=0,
        strict=True,
        description=(
            "Tokens before this position of a request read K and V in the model's dtype, whatever the bits. Also taken "
            "from mlx-lm's own --quantized-kv-start."
        ),
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        strict=True,
        description="Threads of an attention backend that computes on the CPU. Unset: one per processor.",
    )
    max_kv_size: int | None = Field(
        default=None,
        ge=8,
        strict=True,
        description=(
            "Most tokens a request attends to in full-attention layers: its first 4 and its newest ones. "
            "Unset: all. Also taken from mlx-lm's own --max-kv-size."
        ),
    )
    rewind: int = Field(
        default=16,
        ge=0,
        le=4096,
        strict=True,
        description=(
            "Tokens that layers with a window keep beyond it, so that drafts can be taken back (trim); and with few "
            "bits, in the model's dtype beside the page that is being filled."
        ),
    )
    on_full: Literal["preempt", "wait", "error"] = Field(
        default="preempt",
        description=(
            "What a batch does when its rows outgrow the budget: preempt the youngest and compute it again later, "
            "wait (admit a request only if its longest possible answer fits), or fail the row with an error."
        ),
    )
    prefix_cache: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description=(
            "Prompts that were run are stored, for others that begin in the same way: the share of the memory budget "
            "that those in no use may hold. They give way as soon as requests need pages. 0: nothing is stored."
        ),
    )
    prefix_interval: int = Field(
        default=1024,
        ge=1,
        strict=True,
        description=(
            "Models with sliding windows or recurrent layers: a stored prompt can be continued at its end, at the ends "
            "of its messages (server), and every so many tokens in between."
        ),
    )
    prefix_states: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description=(
            "What recurrent layers hold where a stored prompt can be continued may take so much memory, as a share of "
            "the memory budget and beside it."
        ),
    )
    prefix_dir: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "Folder for stored prompts that had to give way, and for all of them at the end: they are found again by "
            "later runs and other processes. Unset: they are kept in memory only."
        ),
    )
    prefix_disk: int | str = Field(
        default="10GiB",
        description='Most bytes in that folder: "10GiB", "500MB" or a number; what was used least recently goes first.',
    )
    max_queue: int | None = Field(
        default=None,
        ge=1,
        strict=True,
        description=(
            "Most requests that wait in the server beside those that run; further ones are refused with HTTP 429. "
            "Unset: no limit."
        ),
    )
    stats: bool = Field(default=False, description="Print a table of pages, bytes and waste after a command.")
    verbose: bool = Field(default=False, description="Log decisions (plan, backend, growth) to standard error.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments beat the environment, and that beats tinykv.toml. Raises ConfigError if the file can't be read."""
        try:
            file_settings = TomlConfigSettingsSource(settings_cls)
        except (OSError, ValueError) as error:
            raise ConfigError(CONFIG_FILE, f"the file can't be read: {error}") from None
        return init_settings, env_settings, file_settings

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _one_line(error, fields) from None

    @field_validator(
        "page_size", "max_pages", "max_kv_size", "rewind", "prefix_interval", "max_queue", "threads", "bits",
        "key_bits", "value_bits", "group_size", "quantized_start", mode="before",
    )  # fmt: skip
    @classmethod
    def _digits(cls, value: object) -> object:
        """Environment variables and flags arrive as text; anything but digits is left for the error message."""
        return int(value) if isinstance(value, str) and value.strip().isdecimal() else value

    @field_validator("memory", mode="before")
    @classmethod
    def _memory(cls, value: object) -> int | float:
        if isinstance(value, str):
            value = float(value) if _FRACTION.fullmatch(value) else parse_bytes(value)
        if isinstance(value, float) and value > 1 and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError("not a number")
        if not (value >= 1 if isinstance(value, int) else 0 < value < 1):
            raise ValueError("out of range")
        return value

    @field_validator("prefix_disk", mode="before")
    @classmethod
    def _disk(cls, value: object) -> object:
        count = parse_bytes(value) if isinstance(value, str) else value
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError("out of range")
        return value

    @property
    def prefix_disk_bytes(self) -> int:
        """The limit of ``prefix_dir`` in bytes."""
        return parse_bytes(self.prefix_disk) if isinstance(self.prefix_disk, str) else self.prefix_disk

    def memory_bytes(self, device_bytes: int) -> int:
        """The budget in bytes; a fraction is taken of ``device_bytes``."""
        assert not isinstance(self.memory, str)
        return int(self.memory * device_bytes) if isinstance(self.memory, float) else self.memory


def allowed(name: str) -> str:
    """What the setting ``name`` may be, in words that fit after "must be"."""
    if name == "memory":
        return "a size such as 4GiB or 500MB, a whole number of bytes, or a fraction above 0 and below 1"
    if name == "prefix_disk":
        return "a size such as 4GiB or 500MB, or a whole number of bytes"
    field = KVCacheConfig.model_fields[name]
    if name == "prefix_dir":
        return "the name of a folder"
    choices = [part for part in (field.annotation, *get_args(field.annotation)) if get_origin(part) is Literal]
    if choices:
        return f"one of {', '.join(map(str, get_args(choices[0])))}"
    if field.annotation is bool:
        return "true or false"
    if field.annotation is str:
        return "a name"
    if field.annotation is float:
        return "a number from 0 to 1"
    least = next(limit.ge for limit in field.metadata if isinstance(limit, Ge))
    most = next((limit.le for limit in field.metadata if isinstance(limit, Le)), None)
    return f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"


def _one_line(error: ValidationError, fields: Mapping[str, Any]) -> ConfigError:
    """The first problem of ``error`` as one line that names the field, the value, its source and what is allowed."""
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else "config"
    variable = ENV_PREFIX + name.upper()
    if name in fields:
        source = ""
    elif any(key.upper() == variable and value for key, value in os.environ.items()):
        source = f" (from the environment variable {variable})"
    else:
        source = f" (from {CONFIG_FILE})"
    if name not in KVCacheConfig.model_fields:
        return ConfigError(name, f"no such setting{source}; there are: {', '.join(KVCacheConfig.model_fields)}")
    value = " ".join(reprlib.repr(first["input"]).split())
    return ConfigError(name, f"{value} is not allowed{source}: it must be {allowed(name)}")
