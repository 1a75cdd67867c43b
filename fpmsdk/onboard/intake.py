"""Facts of a model from its local `config.json` and ModelOpt sidecar; nothing is fetched, imported or executed.

Multimodal checkpoints are read for their text decoder. Source: onboarding.md sections 3.1 and 3.2.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fpmsdk.errors import OnboardError
from fpmsdk.files import UnfitFileError, is_git_lfs_pointer, read_regular, sha256
from fpmsdk.onboard import sidecar
from fpmsdk.onboard.config_fields import (
    ALIASES,
    AUXILIARY_FIELDS,
    EXPERT_FIELDS,
    LATENT_FIELDS,
    dimension,
    dtype,
    finite,
    integer,
    require_finite,
    text,
)
from fpmsdk.onboard.hub_snapshots import snapshot_of
from fpmsdk.onboard.layouts import DENSE, INKLING, check_layout, layout_notes
from fpmsdk.onboard.precision import check_quantization

MODELING_SCOPE = (
    "text decoder only: encoders, projectors and preprocessing of multimodal models are outside timings and estimates. "
    "An observed cache capacity includes whatever the worker has loaded; nothing is subtracted from it"
)
_MAX_BYTES = 64 * 2**20
_OF_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
}
_SPARSE = frozenset(_OF_MODEL_TYPE.values()) - DENSE
# Of a wrapper, taken together as soon as the text section says nothing of the first names.
_INHERITED = (
    (("dtype", "torch_dtype"), ()),
    (("quantization_config", "hf_quant_config", "quant_algo"), ("quant_dynamic", "kv_cache_quant_algo")),
)


@dataclass(frozen=True)
class ModelConfig:
    """What intake found. Made by `load_model_config`.

    `raw` is the text decoder's configuration in use, `sha256` that of the file's bytes, never of a checkpoint.
    `suggestions` hold `model, architecture, context_length, num_experts, model_kind` as far as they are known; the
    architecture is the one that a collector identifies, which may be a wrapper's, `decoder_architecture` the one that
    rules and estimates go by. `notes` say where facts come from; `source_files` are other files by name with their
    SHA-256; `runtime_layout` is why the cache has to be probed, empty when the file establishes it.

    Source: onboarding.md section 3.1.
    """

    path: Path
    raw: dict[str, Any]
    sha256: str
    decoder_architecture: str | None
    suggestions: dict[str, Any]
    notes: dict[str, str]
    source_files: dict[str, str] = field(default_factory=dict)
    runtime_layout: tuple[str, ...] = ()


def load_model_config(path: str | os.PathLike[str]) -> ModelConfig:
    """Read a `config.json`, with the sidecar in the same directory when there is one.

    Parameters
    ----------
    path: the file; a link as in a hub cache is followed, but the sidecar is looked for beside the link.

    Raises
    ------
    OnboardError: malformed, contradictory or of a kind that is not onboarded; names the file and the field.
    OSError: it cannot be read.

    Source: onboarding.md sections 3.1 and 3.2.

    >>> import tempfile
    >>> from fpmsdk.sample.tiny import write_checkpoint
    >>> found = load_model_config(Path(write_checkpoint(tempfile.mkdtemp())) / "config.json")
    >>> found.suggestions["architecture"], found.suggestions["model_kind"]
    ('LlamaForCausalLM', 'dense')
    """
    place = Path(path).expanduser().absolute()
    document, digest = _read(place)
    try:
        decoder, notes = _decoder(document)
        require_finite(decoder)
        check_quantization(decoder)
    except OnboardError as fault:
        raise _in_file(place, fault) from None
    beside = place.with_name(sidecar.NAME)
    source_files = {}
    if beside.is_file():
        content, source_files[sidecar.NAME] = _read(beside)
        try:
            decoder = _with_sidecar(document, decoder, content)
        except OnboardError as fault:
            raise _in_file(beside, fault) from None
        notes["quantization_sidecar"] = f"{beside}, sha256 {source_files[sidecar.NAME]}; read for quantisation alone"
    try:
        return _checked(place, document, decoder, notes, digest, source_files)
    except OnboardError as fault:
        raise _in_file(place, fault) from None


def _in_file(place: Path, fault: OnboardError) -> OnboardError:
    return type(fault)(f"{place}: {fault}", fault.path)


def _read(place: Path) -> tuple[dict[str, Any], str]:
    """A JSON object without repeated keys, and the digest of its bytes."""
    try:
        content = read_regular(place, limit_bytes=_MAX_BYTES)
    except UnfitFileError as fault:
        raise OnboardError(f"{place}: {fault}", str(place)) from None
    if is_git_lfs_pointer(content):
        raise OnboardError(f"{place}: a Git LFS pointer, not the file; run `git lfs pull` there", str(place))
    try:
        # Infinity and NaN may be anywhere that is not read.
        document = json.loads(content, object_pairs_hook=_distinct)
    except OnboardError as fault:
        raise _in_file(place, fault) from None
    except (ValueError, RecursionError) as fault:
        raise OnboardError(f"{place}: invalid JSON: {fault}", str(place)) from None
    if not isinstance(document, dict):
        raise OnboardError(f"{place}: must hold one object, found {type(document).__name__}", str(place))
    return document, sha256(content)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise OnboardError(f"the key {repeated!r} is given twice; keep one", repeated)
    return fields


def _decoder(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The text decoder's part, with what it inherits, and first notes."""
    notes = {"modeling_scope": MODELING_SCOPE}
    if "text_config" not in document:
        return document, notes
    section = document["text_config"]
    if not isinstance(section, dict) or not section:
        raise OnboardError(
            f"text_config must be an object that describes one text decoder, found {section!r}; give a decoder's "
            "config or a profile",
            "text_config",
        )
    if "text_config" in section:
        raise OnboardError(
            "text_config.text_config: which decoder is meant is not clear; give its own config", "text_config"
        )
    decoder, inherited = dict(section), []
    for names, along in _INHERITED:
        if all(decoder.get(name) is None for name in names):
            found = [name for name in names if document.get(name) is not None]
            found += [name for name in along if decoder.get(name) is None and document.get(name) is not None]
            decoder |= {name: document[name] for name in found}
            inherited += found
    notes["decoder_config"] = "text_config; sizes of the wrapper and its encoders are left out"
    if inherited:
        notes["shared_metadata"] = f"{', '.join(inherited)} of the wrapper; text_config says nothing of it"
    return decoder, notes


def _with_sidecar(document: Mapping[str, Any], decoder: Mapping[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    finite(content.get("quantization"), "quantization")
    for inline in (document.get("hf_quant_config"), decoder.get("hf_quant_config")):
        if inline is not None and inline != content:
            raise OnboardError("contradicts hf_quant_config inside config.json; keep one of the two", "hf_quant_config")
    return sidecar.attach_sidecar(decoder, content)


def architecture_of(config: Mapping[str, Any]) -> str | None:
    """The architecture that a configuration names, by class or by `model_type`; None when by neither.

    >>> architecture_of({"model_type": "qwen3"})
    'Qwen3ForCausalLM'
    """
    named = config.get("architectures")
    architecture = None
    if named is not None:
        if not isinstance(named, list) or len(named) != 1:
            raise OnboardError(f"architectures must name exactly one class, found {named!r}", "architectures")
        architecture = text(named[0], "architectures[0]")
    kind = text(config["model_type"], "model_type") if "model_type" in config else ""
    expected = _OF_MODEL_TYPE.get(kind)
    if expected and architecture and expected != architecture:
        raise OnboardError(f"model_type {kind!r} contradicts architectures {architecture!r}", "model_type")
    return architecture or expected


def check_experts(config: Mapping[str, Any], architecture: str | None, experts: int | None) -> None:
    """Refuse a number of experts that contradicts the architecture or the experts of a token.

    Raises
    ------
    OnboardError: names the field.
    """
    chosen = config.get("num_experts_per_tok")
    if experts and chosen is not None and chosen > experts:
        raise OnboardError(f"num_experts_per_tok {chosen} exceeds the {experts} experts", "num_experts_per_tok")
    if architecture in DENSE and experts not in (None, 0):
        raise OnboardError(f"num_experts {experts} contradicts the dense {architecture}", "num_experts")
    if architecture in _SPARSE and experts == 0:
        raise OnboardError(f"num_experts must be positive of {architecture}, found 0", "num_experts")


def _checked(
    place: Path,
    document: dict[str, Any],
    decoder: dict[str, Any],
    notes: dict[str, str],
    digest: str,
    source_files: dict[str, str],
) -> ModelConfig:
    own = architecture_of(decoder)
    architecture = own
    if "text_config" in document:
        if decoder.get("architectures") is None and (wrapper := architecture_of(document)):
            architecture = wrapper
            notes["architecture"] = f"{wrapper} of the wrapper, which identifies the checkpoint"
        notes["decoder_architecture"] = (
            f"{own} of text_config, which rules and estimates go by" if own else "text_config names no architecture"
        )
    layout = check_layout(decoder, own, own or architecture, inkling=architecture == INKLING)
    sizes = {name: dimension(decoder, name, zero_heads=bool(layout)) for name in ALIASES}
    for name in (*EXPERT_FIELDS, *LATENT_FIELDS, *AUXILIARY_FIELDS):
        zero = name in AUXILIARY_FIELDS or (bool(layout) and name in LATENT_FIELDS)
        if decoder.get(name) is not None:
            integer(decoder[name], name, least=0 if zero else 1)
    experts = sizes["num_experts"]
    check_experts(decoder, own, experts)
    _check_sizes(decoder, sizes)
    if own in DENSE:
        experts = 0
    notes |= {name: f"{name} {size} of config.json" for name, size in sizes.items() if size is not None}
    extra = (*EXPERT_FIELDS, *LATENT_FIELDS, *AUXILIARY_FIELDS)
    notes |= {name: f"{name} {decoder[name]} of config.json" for name in extra if decoder.get(name) is not None}
    notes |= layout_notes(decoder, own, layout)
    notes |= _metadata_notes(place, document, decoder)
    suggestions = _suggestions(document, notes, architecture, sizes["context_length"], experts)
    return ModelConfig(place, decoder, digest, own, suggestions, notes, source_files, layout)


def _check_sizes(decoder: Mapping[str, Any], sizes: Mapping[str, int | None]) -> None:
    heads, shared = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    if heads and shared and heads % shared:
        raise OnboardError(
            f"num_key_value_heads must divide num_attention_heads, found {shared} and {heads}", "num_key_value_heads"
        )
    layers, dense = sizes["num_hidden_layers"], decoder.get("first_k_dense_replace")
    if layers and dense is not None and dense > layers:
        raise OnboardError(f"first_k_dense_replace {dense} exceeds the {layers} layers", "first_k_dense_replace")


def _suggestions(
    document: Mapping[str, Any],
    notes: dict[str, str],
    architecture: str | None,
    context: int | None,
    experts: int | None,
) -> dict[str, Any]:
    names = {text(document[key], key) for key in ("_name_or_path", "name_or_path") if document.get(key)}
    if len(names) > 1:
        raise OnboardError(f"_name_or_path and name_or_path disagree: {sorted(names)}", "_name_or_path")
    found: dict[str, Any] = {
        "model": next(iter(names), None),
        "architecture": architecture,
        "context_length": context,
        "num_experts": experts,
        "model_kind": None if experts is None else "moe" if experts else "dense",
    }
    if names:
        notes["model"] = "name in config.json; an explicit identity goes first"
    if architecture:
        notes.setdefault("architecture", "architecture of config.json")
    if experts == 0:
        notes.setdefault("num_experts", "dense architecture")
    return {name: value for name, value in found.items() if value is not None}


def _metadata_notes(place: Path, document: Mapping[str, Any], decoder: Mapping[str, Any]) -> dict[str, str]:
    notes = {}
    if found := dtype(decoder):
        notes["dtype"] = f"{found} tensors; says nothing of how attention and cache run"
    if decoder.get("auto_map") or document.get("auto_map"):
        notes["auto_map"] = "remote code is referred to; it was neither read nor run"
    if (quantization := decoder.get("quantization_config")) is not None:
        names = ("quant_method", "quant_algo", "weight_block_size", "kv_cache_scheme")
        stated = {name: quantization[name] for name in names if name in quantization}
        notes["quantization"] = f"{json.dumps(stated, sort_keys=True)}; scales and exclusions are not counted"
    for name in ("num_nextn_predict_layers", "num_mtp_modules", "mtp_transformer_layers", "use_mtp"):
        if name in decoder:
            notes[name] = f"{decoder[name]}; what a checkpoint can do turns no speculation on"
    if (snapshot := snapshot_of(place.parent)) is not None:
        notes["hub_snapshot"] = f"{snapshot.repository} at revision {snapshot.revision}, by its directory"
    return notes
