"""What the sections of the schema share: number types, and how a value is refused before pydantic misreads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

LARGEST = 2**31 - 1
LARGEST_SEED = 2**63 - 1
PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, slots=True)
class Alone:
    """Marks a field whose flag may stand without a value, and the value that it then has."""

    value: str


class Section(BaseModel):
    """Options of one subject. `title` heads its group in --help."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    title: ClassVar[str] = ""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_what_would_be_misread(cls, value: object, info: ValidationInfo) -> object:
        """Pydantic reads true as 1, Path("") is the current directory, and no path holds a NUL."""
        name = info.field_name or ""
        if isinstance(value, str):
            if not value.strip():
                raise ValueError("is empty; give a value or leave it out")
            if "\0" in value:
                raise ValueError("holds a NUL character")
        of_bool = name in cls.model_fields and cls.model_fields[name].annotation is bool
        parts = value if isinstance(value, list | tuple) else [value]
        if not of_bool and any(isinstance(part, bool) for part in parts):
            raise ValueError("must not be true or false")
        if of_bool and not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value
