"""The configuration file of a model as evidence in a plan, and the part of it that describes its decoder.

Source: collector.md section 1.3.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from fpmsdk.config.systems import resolve_systems_paths
from fpmsdk.documents.canonical import read_document
from fpmsdk.errors import OnboardError, UnsupportedModelError
from fpmsdk.files import sha256
from fpmsdk.opgraph.model_config import BUNDLE, find_model_config

_DTYPES = ("dtype", "torch_dtype")
_QUANTIZATION = ("quantization_config", "hf_quant_config", "quant_algo")
_DERIVED = ("quant_dynamic", "kv_cache_quant_algo")


class ModelEvidence:
    """A model's configuration with its quantisation sidecar, and where it came from.

    Attributes
    ----------
    payload: the document; the sidecar is under `hf_quant_config`.
    source_kind: `explicit`, `local`, `aic_cache` or, in saved plans, `huggingface`.
    """

    def __init__(self, payload: dict[str, Any], source_kind: str) -> None:
        self.payload = payload
        self.source_kind = source_kind

    @cached_property
    def sha256(self) -> str:
        """Digest of the sorted compact document, characters beyond ASCII as they are."""
        return sha256(json.dumps(self.payload, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())

    @cached_property
    def decoder(self) -> dict[str, Any]:
        """The text decoder; it inherits precision and architecture of a wrapper where it states none itself."""
        text = self.payload.get("text_config")
        if not isinstance(text, dict):
            return dict(self.payload)
        decoder = dict(text)
        for names, derived in ((_DTYPES, ()), (_QUANTIZATION, _DERIVED)):
            if all(text.get(name) is None for name in names):
                inherited = {name: self.payload[name] for name in names if self.payload.get(name) is not None}
                inherited |= {
                    name: self.payload[name]
                    for name in derived
                    if text.get(name) is None and self.payload.get(name) is not None
                }
                decoder |= inherited
        if decoder.get("architectures") is None and self.payload.get("architectures") is not None:
            decoder["architectures"] = self.payload["architectures"]
        return decoder

    @property
    def sidecar(self) -> dict[str, Any]:
        """The `quantization` section of the sidecar, empty without one."""
        found = self.decoder.get("hf_quant_config") or self.payload.get("hf_quant_config")
        section = found.get("quantization") if isinstance(found, Mapping) else None
        return dict(section) if isinstance(section, Mapping) else {}

    @property
    def quantization(self) -> dict[str, Any]:
        """The `quantization_config` of the decoder, empty without one."""
        found = self.decoder.get("quantization_config")
        return dict(found) if isinstance(found, Mapping) else {}

    def architecture(self, declared: str | None = None) -> str | None:
        """The first of `architectures`, else what was declared."""
        names = self.decoder.get("architectures")
        if isinstance(names, list) and names:
            return str(names[0])
        return self.decoder.get("architecture") or declared

    def document(self) -> dict[str, Any]:
        """`model_config` of a plan's capability."""
        return {"source_kind": self.source_kind, "sha256": self.sha256, "payload": self.payload}


def load_model_evidence(model_path: str, explicit: str | os.PathLike[str] | None = None) -> ModelEvidence:
    """The configuration of a model, from a file that is named, from a local checkpoint, or from a data package.

    Parameters
    ----------
    model_path: a folder, a file, or a public name.
    explicit: `config.json`, or a folder with one; the sidecar beside it is read too.

    Raises
    ------
    OnboardError: no such file or known name, an empty configuration, or one that contradicts its sidecar.
    """
    if explicit is not None:
        path = Path(explicit).expanduser()
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise OnboardError(f"--fpm-model-config: {path} does not exist", "model_config")
        return _read(path, path.with_name("hf_quant_config.json"), "explicit")
    # As everywhere: bundled configurations lie beside the descriptions of systems.
    bundles = [Path(root).parent / BUNDLE for root in resolve_systems_paths()]
    try:
        path, sidecar = find_model_config(model_path, bundles)
    except UnsupportedModelError as fault:
        place = f"{bundles[0]}/" if bundles else f"{BUNDLE}/ beside the folder that FPMSDK_SYSTEMS_PATH names, as "
        raise OnboardError(
            f"{fault}; put its config.json at {place}{model_path.replace('/', '--')}_config.json, or plan with the "
            "path of a local model folder (the collector itself takes --fpm-model-config)",
            "model_path",
        ) from None
    is_local = Path(model_path).expanduser().exists()
    return _read(path, sidecar, "local" if is_local else "aic_cache")


def _read(path: Path, sidecar_path: Path, source_kind: str) -> ModelEvidence:
    payload = read_document(path, follow_links=True)
    # Before the sidecar is added: an empty configuration identifies no model.
    if not isinstance(payload, dict) or not payload:
        raise OnboardError(f"{path}: expected an object with fields, found {payload!r}", str(path))
    if sidecar_path.is_file():
        sidecar = read_document(sidecar_path, follow_links=True)
        if not isinstance(sidecar, dict):
            raise OnboardError(f"{sidecar_path}: expected an object, found {sidecar!r}", str(sidecar_path))
        payload = _with_sidecar(payload, sidecar, sidecar_path)
    return ModelEvidence(payload, source_kind)


def _with_sidecar(payload: dict[str, Any], sidecar: dict[str, Any], path: Path) -> dict[str, Any]:
    inline = payload.get("hf_quant_config")
    if inline is not None and inline != sidecar:
        raise OnboardError(f"{path}: contradicts hf_quant_config of config.json; keep one of them", str(path))
    if not sidecar:
        return payload
    result = {**payload, "hf_quant_config": sidecar}
    section = sidecar.get("quantization")
    if "quantization_config" not in payload and isinstance(section, dict):
        algorithm = section.get("quant_algo") or section.get("quantization_algo")
        cache = section.get("kv_cache_quant_algo")
        named = {"quant_method": algorithm, "kv_cache_quant_method": cache}
        found = {name: str(value).lower() for name, value in named.items() if value}
        if found:
            result["quantization_config"] = found
    _check_agreement(payload, section if isinstance(section, dict) else {}, path)
    return result


def _check_agreement(payload: Mapping[str, Any], section: Mapping[str, Any], path: Path) -> None:
    inline = ModelEvidence(dict(payload), "").quantization
    stated = inline.get("quant_algo") or inline.get("quant_method")
    algorithm = section.get("quant_algo") or section.get("quantization_algo")
    if not stated or not algorithm:
        return
    stated, algorithm = _plain(stated), _plain(algorithm)
    if algorithm == "fp8_block" and inline.get("weight_block_size"):
        stated = "fp8_block" if stated == "fp8" else stated
    # A container says how weights are stored, layer by layer, and no algorithm.
    if stated not in ("modelopt", "compressed-tensors") and algorithm not in ("mixed_precision", stated):
        raise OnboardError(
            f"{path}: quant_algo {algorithm!r} contradicts {stated!r} of config.json; correct one of them", str(path)
        )


def _plain(name: Any) -> str:
    plain = str(name).strip().lower()
    return {"w4a16_mxfp4": "mxfp4", "mixed-precision": "mixed_precision", "mixedprecision": "mixed_precision"}.get(
        plain, plain
    )
