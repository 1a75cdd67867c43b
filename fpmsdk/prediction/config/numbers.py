"""Numbers of a configuration: strict about text, booleans and fractions; a whole number may stand for a real one."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
PositiveReal = Annotated[float, Field(gt=0, strict=False)]
NotNegativeReal = Annotated[float, Field(ge=0, strict=False)]
Fraction = Annotated[float, Field(gt=0, le=1, strict=False)]
Text = Annotated[str, Field(min_length=1)]
