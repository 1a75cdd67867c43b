from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpmsdk._ext.grid import GridTable
from fpmsdk._ext.sites import GemmSite

MISSING_FLOPS: int
UNEVEN_BATCH: int
NOT_FINITE: int
SOURCES: dict[int, str]

Hardware = Mapping[str, float]
Extras = Sequence[tuple[float, float]]

class Operator:
    @property
    def name(self) -> str: ...
    @property
    def scale_factor(self) -> float: ...
    def answers_as(self, other: Operator) -> bool: ...
    def ask(self, batch: int, seq_len: int, prefix: int, tokens: int, at_sol: bool = False) -> tuple[Any, ...]: ...
    def lookups(
        self, batch: int, seq_len: int, prefix: int, tokens: int
    ) -> list[tuple[GridTable | GemmSite, dict[str, float]]]: ...
    def table_sol_ms(self, *coordinates: float) -> float: ...
    def parts(self, batch: int, seq_len: int, prefix: int, tokens: int) -> list[tuple[Operator, bool]]: ...
    def missing(
        self, batch: int, seq_len: int, prefix: int, tokens: int, at_sol: bool = False
    ) -> tuple[Operator, int] | None: ...

class MemoryOp(Operator):
    def __init__(
        self,
        name: str,
        scale_factor: float,
        hardware: Hardware,
        bytes_per_token: float,
        scale_num_tokens: int,
        seq_split: int,
    ) -> None: ...

class ScaleTable:
    def __init__(
        self,
        table: GridTable,
        bounds: tuple[float, float, float, float],
        factor: float,
        mem_bw_bytes_per_s: float,
        scale_beyond: bool,
    ) -> None: ...

class Gemm(Operator):
    def __init__(
        self,
        name: str,
        scale_factor: float,
        hardware: Hardware,
        site: GemmSite | None,
        n: float,
        k: float,
        flops_per_s: float,
        bytes_per_element: float,
        scale_num_tokens: int,
        seq_split: int,
        below_grid_sol: bool,
        estimated: bool,
        compute_scale: ScaleTable | None,
        scale_matrix: ScaleTable | None,
    ) -> None: ...

class ContextAttention(Operator):
    def __init__(
        self,
        name: str,
        scale_factor: float,
        hardware: Hardware,
        table: GridTable | None,
        num_heads: float,
        shape: tuple[float, ...],
        cp_size: int,
        extra_bytes: Extras,
    ) -> None: ...

class GenerationAttention(Operator):
    def __init__(
        self,
        name: str,
        scale_factor: float,
        hardware: Hardware,
        table: GridTable | None,
        num_heads: float,
        shape: tuple[float, ...],
        scale_num_tokens: int,
        verify_query_tokens: int,
        extra_bytes: Extras,
    ) -> None: ...

class Collective(Operator):
    def __init__(
        self,
        name: str,
        scale_factor: float,
        hardware: Hardware,
        table: GridTable | None,
        elements_per_token: float,
        seq_split: int,
        beyond_factor: float,
        sol_ms_per_element: float,
        is_alone: bool,
        is_library: bool = False,
    ) -> None: ...

class PipelineTransfer(Operator):
    def __init__(
        self,
        name: str,
        scale_factor: float,
        hardware: Hardware,
        pp_size: int,
        hidden_size: float,
        seq_split: int,
    ) -> None: ...

class Moe(Operator):
    def __init__(
        self,
        name: str,
        scale_factor: float,
        hardware: Hardware,
        table: GridTable | None,
        low_latency_table: GridTable | None,
        low_latency_tokens: int,
        shape: dict[str, float],
        attention_dp_size: int,
    ) -> None: ...

class ContextMla(Operator):
    def __init__(
        self,
        name: str,
        scale_factor: float,
        hardware: Hardware,
        table: GridTable | None,
        num_heads: float,
        shape: tuple[float, ...],
        cp_size: int,
    ) -> None: ...

class GenerationMla(Operator):
    def __init__(
        self,
        name: str,
        scale_factor: float,
        hardware: Hardware,
        table: GridTable | None,
        num_heads: float,
        shape: tuple[float, ...],
    ) -> None: ...

class MlaBmm(Operator):
    def __init__(
        self,
        name: str,
        scale_factor: float,
        hardware: Hardware,
        table: GridTable | None,
        num_heads: float,
        flops_per_s: float,
        bytes_per_element: float,
        head_factor: float,
    ) -> None: ...

class Sum(Operator):
    def __init__(self, name: str, scale_factor: float, hardware: Hardware, parts: Sequence[Operator]) -> None: ...

class Overlap(Operator):
    def __init__(
        self,
        name: str,
        scale_factor: float,
        hardware: Hardware,
        first: Sequence[Operator],
        second: Sequence[Operator],
    ) -> None: ...

class Fallback(Operator):
    def __init__(
        self, name: str, scale_factor: float, hardware: Hardware, primary: Operator, parts: Sequence[Operator]
    ) -> None: ...

def generation_attention_floor(
    axes: Sequence[NDArray[Any]], shape: tuple[float, ...], mem_bw_bytes_per_s: float
) -> NDArray[np.float64]: ...
