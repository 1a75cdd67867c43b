"""A checkpoint's `config.json`: where it is found, what it must hold, and the model's shape.

Reads the language model only, towers of multimodal checkpoints excluded. How the checkpoint is quantised is
interpreted in `precision.py`. Source: op-level.md section 4.1.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fpmsdk.config.systems import DATA_PACKAGES, directories_in_package
from fpmsdk.errors import ModelConfigError, UnsupportedModelError
from fpmsdk.files import is_git_lfs_pointer
from fpmsdk.opgraph.architectures import (
    DEEPSEEK,
    GEMMA4,
    GROUPED,
    HYBRID_MOE,
    LLAMA,
    MOE,
    MUSE,
    NAS,
    STEP,
    Architecture,
    find_architecture,
)
from fpmsdk.opgraph.config_fields import Fields
from fpmsdk.opgraph.layer_groups import LayerGroup, read_layer_groups

# Where data packages bundle checkpoint configurations.
BUNDLE = "model_configs"

# Alternative spellings of one field, in the order in which they are looked up.
_HEAD_SIZE = ("head_dim", "attention_head_dim")
_TOPK = ("num_experts_per_tok", "top_k_experts", "moe_top_k")
_EXPERTS = ("num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts")
_EXPERT_SIZE = ("moe_intermediate_size", "intermediate_size")

# Layouts are read layer by layer, so the number of layers must not be a way to stop a process.
_MOST_LAYERS = 100_000


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a language model, in elements of the whole model (not of one rank).

    `groups` describes the layers of models in which they differ. `gates_heads` says that a gate scales the output of
    every attention head, `shared_inter_size` is that of a shared expert beside the routed ones.
    `windowed_layers` attend to `attention_window` tokens, the others to all.
    `quantization` holds the checkpoint's `quantization_config`, `sidecar` the `quantization` part of its
    `hf_quant_config.json`; both empty when absent.

    Sizes are counts of elements, layers or heads; `context_length` is in tokens. Made by `read_model_config`.
    Source: op-level.md section 4.1.

    >>> shape = {"num_layers": 2, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "head_size": 64}
    >>> shape |= {"inter_size": 512, "vocab_size": 1024, "context_length": 4096}
    >>> ModelConfig(name="m", architecture="LlamaForCausalLM", family="llama", **shape).num_experts
    0
    """

    name: str
    architecture: str
    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    inter_size: int
    vocab_size: int
    context_length: int
    topk: int = 0
    num_experts: int = 0
    moe_inter_size: int = 0
    num_moe_layers: int = 0
    num_shared_experts: int = 0
    v_head_dim: int = 0
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    use_qk_norm: bool = False
    attention_window: int = 0
    windowed_layers: int = 0
    groups: tuple[LayerGroup, ...] = ()
    shared_inter_size: int = 0
    gates_heads: bool = False
    dtype: str = ""
    quantization: dict[str, Any] = {}
    sidecar: dict[str, Any] = {}

    @property
    def is_moe(self) -> bool:
        """Whether a deployment has to say how experts are divided."""
        return self.family not in (LLAMA, MUSE, NAS)


def read_model_config(model: str, search: Sequence[str | Path] = ()) -> ModelConfig:
    """Read the configuration of a model.

    Parameters
    ----------
    model: a directory with a `config.json`, the path of such a file, or the name of a bundled configuration
        (`organisation/model`).
    search: directories of bundled configurations (`organisation--model_config.json`) to look into first, then
        those of the installed data packages.

    Returns
    -------
    The shape of the language model; weights are never read.

    Raises
    ------
    ModelConfigError: unreadable, or with missing, null, ill-typed or contradictory fields; all of them listed.
    UnsupportedModelError: unknown name, or an architecture without a graph; the nearest known ones are named.

    Source: op-level.md section 4.1.

    >>> import tempfile
    >>> from fpmsdk.sample.tiny import write_checkpoint
    >>> model = read_model_config(write_checkpoint(tempfile.mkdtemp()))
    >>> model.architecture, model.num_layers, model.num_heads, model.head_size
    ('LlamaForCausalLM', 4, 8, 64)
    """
    path, sidecar_path = find_model_config(model, search)
    config = _read_object(path)
    sidecar = _read_object(sidecar_path) if sidecar_path.is_file() else {}
    return parse_model_config(model, config, sidecar, str(path))


def read_raw_config(model: str, search: Sequence[str | Path] = ()) -> dict[str, Any]:
    """The `config.json` document of a model of any architecture.

    Parameters and errors are those of `read_model_config`, except that nothing inside the document is checked.
    """
    return _read_object(find_model_config(model, search)[0])


def language_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a document that describes the language model.

    >>> language_config({"architectures": ["X"], "text_config": {"hidden_size": 8}})
    {'hidden_size': 8}
    """
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) and "num_hidden_layers" not in config else config


def bundled_models(search: Sequence[str | Path] = ()) -> list[str]:
    """Names of all bundled configurations, sorted.

    >>> bundled_models(["/nonexistent"]) == bundled_models()
    True
    """
    suffix, sidecar = "_config.json", "_hf_quant_config.json"
    files = {path.name for folder in _bundles(search) for path in folder.glob(f"*{suffix}")}
    return sorted(name.removesuffix(suffix).replace("--", "/") for name in files if not name.endswith(sidecar))


def find_model_config(model: str, search: Sequence[str | Path] = ()) -> tuple[Path, Path]:
    """Paths of the `config.json` of a model and of its quantisation sidecar; nothing is read.

    Parameters and errors are those of `read_model_config`.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path / "config.json", path / "hf_quant_config.json"
    if path.is_file():
        return path, path.with_name("hf_quant_config.json")
    stem = model.replace("/", "--")
    for folder in _bundles(search):
        if (bundled := folder / f"{stem}_config.json").is_file():
            return bundled, folder / f"{stem}_hf_quant_config.json"
    raise _unknown_model(model, bundled_models(search))


def _unknown_model(model: str, known: list[str]) -> UnsupportedModelError:
    import difflib

    nearest = difflib.get_close_matches(model, known, n=3, cutoff=0.3)
    hint = f"; the nearest bundled ones are {', '.join(nearest)}" if nearest else ""
    return UnsupportedModelError(
        f"model {model!r} is no directory with a config.json, no such file and no bundled configuration{hint}",
        "model",
    )


def _bundles(search: Sequence[str | Path]) -> list[Path]:
    """Existing folders of bundled configurations; the packages are located but not imported."""
    folders = [Path(folder) for folder in search if Path(folder).is_dir()]
    for package in DATA_PACKAGES.values():
        folders += map(Path, directories_in_package(package, BUNDLE))
    return folders


def _read_object(path: Path) -> dict[str, Any]:
    repeated: list[str] = []

    def as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = Counter(name for name, _ in pairs)
        repeated.extend(f"{name} is given {count} times" for name, count in names.items() if count > 1)
        return dict(pairs)

    try:
        content = path.read_bytes()
        if is_git_lfs_pointer(content):
            raise ModelConfigError(str(path), ["a Git LFS pointer, not the file; run `git lfs pull` in that checkout"])
        document = json.loads(content, object_pairs_hook=as_object)
    except FileNotFoundError:
        raise ModelConfigError(str(path), ["the file does not exist"]) from None
    except OSError as fault:
        raise ModelConfigError(str(path), [f"the file cannot be read: {fault.strerror}"]) from fault
    except ModelConfigError:
        raise
    except (ValueError, RecursionError) as fault:
        raise ModelConfigError(str(path), [f"not a JSON document: {fault}"]) from None
    if not isinstance(document, dict):
        raise ModelConfigError(str(path), [f"must be an object, found {type(document).__name__}"])
    if repeated:
        raise ModelConfigError(str(path), repeated)
    return document


def parse_model_config(
    name: str, config: Mapping[str, Any], sidecar: Mapping[str, Any] | None = None, path: str = "config.json"
) -> ModelConfig:
    """Check a `config.json` document with its optional `hf_quant_config.json` and return the model's shape.

    Raises as `read_model_config`.
    """
    faults: list[str] = []
    architecture = _architecture_name(config, faults)
    if not architecture:
        # What every family needs is looked for all the same, so that one reading finds all of it.
        _shape(Fields(language_config(dict(config)), "", faults), Architecture(family=""))
        raise ModelConfigError(path, faults)
    entry = find_architecture(architecture)

    root = Fields(config, "", faults)
    text = root
    if entry.text_config and entry.text_config in config:
        text = Fields(root.mapping(entry.text_config), f"{entry.text_config}.", faults)
    quantization = root if "quantization_config" in config else text
    shape = _shape(text, entry)
    groups = read_layer_groups(architecture, text, shape) if entry.family in GROUPED else ()
    parsed = ModelConfig(
        name=name,
        architecture=architecture,
        family=entry.family,
        use_qk_norm=entry.use_qk_norm,
        dtype=str(text.values.get("dtype") or text.values.get("torch_dtype") or ""),
        groups=groups,
        gates_heads=entry.family == STEP and bool(text.values.get("use_head_wise_attn_gate")),
        quantization=quantization.mapping("quantization_config"),
        sidecar=Fields(sidecar or {}, "hf_quant_config.json: ", faults).mapping("quantization"),
        **shape,
    )
    _check_quantization(Fields(parsed.quantization, f"{quantization.prefix}quantization_config.", faults))
    _check_quantization(Fields(parsed.sidecar, "hf_quant_config.json: quantization.", faults))
    if faults:
        raise ModelConfigError(path, faults)
    return parsed


def _check_quantization(fields: Fields) -> None:
    """Record what is not of the form that inference of the precision relies on."""
    for name in ("modules_to_not_convert", "exclude_modules", "ignore", "weight_block_size"):
        value = fields.values.get(name)
        if value is not None and not isinstance(value, list):
            fields.fault(name, f"must be a list, found {value!r}")
    block = fields.values.get("weight_block_size")
    if isinstance(block, list) and not all(type(size) is int and size > 0 for size in block):
        fields.fault("weight_block_size", f"must hold positive integers, found {block!r}")
    for name, group in fields.mapping("config_groups").items():
        parts = Fields(group if isinstance(group, dict) else {}, f"{fields.prefix}config_groups.{name}.", fields.faults)
        parts.mapping("weights")
        targets = parts.values.get("targets")
        if targets is not None and not isinstance(targets, list):
            parts.fault("targets", f"must be a list, found {targets!r}")


def _architecture_name(config: Mapping[str, Any], faults: list[str]) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str) and names[0]:
        return names[0]
    found = "is missing" if "architectures" not in config else f"must be a list of names, found {names!r}"
    faults.append(f"architectures {found}")
    return ""


def _shape(fields: Fields, entry: Architecture) -> dict[str, int]:
    shape = {
        "num_layers": fields.count("num_hidden_layers", most=_MOST_LAYERS),
        "hidden_size": fields.count("hidden_size"),
        "num_heads": fields.count("num_attention_heads"),
        # Blocks of a searched architecture have their own.
        "num_kv_heads": fields.count("num_key_value_heads", required=entry.family != NAS),
        "vocab_size": fields.count("vocab_size"),
        "context_length": fields.count("max_position_embeddings"),
        "inter_size": fields.count("intermediate_size", required=entry.family in (LLAMA, MUSE, GEMMA4)),
        "head_size": fields.count(*_HEAD_SIZE, required=False),
    }
    heads, kv_heads = shape["num_heads"], shape["num_kv_heads"]
    if heads and kv_heads and heads % kv_heads:
        fields.fault("num_key_value_heads", f"must divide num_attention_heads: {kv_heads} does not divide {heads}")
    if heads and not shape["head_size"]:
        # The checkpoint leaves the head size to this quotient.
        if shape["hidden_size"] % heads:
            fields.fault("head_dim", f"is missing and {heads} heads do not divide hidden_size {shape['hidden_size']}")
        shape["head_size"] = shape["hidden_size"] // heads
    if entry.alternating_window:
        shape |= {"attention_window": entry.alternating_window, "windowed_layers": shape["num_layers"] // 2}
    if entry.sliding_window and (window := fields.count("sliding_window", required=False)):
        shape |= {"attention_window": window, "windowed_layers": shape["num_layers"]}
    if entry.family in (MOE, DEEPSEEK, HYBRID_MOE, STEP) or (entry.family == GEMMA4 and _has_experts(fields)):
        shape |= _experts(fields)
    if entry.family == STEP:
        shape["shared_inter_size"] = fields.count("share_expert_dim", required=False, least=0)
    if entry.family == DEEPSEEK:
        for size in ("v_head_dim", "kv_lora_rank", "qk_rope_head_dim"):
            shape[size] = fields.count(size, required=False)
        shape["num_shared_experts"] = fields.count("n_shared_experts", required=False, least=0)
        shape["num_moe_layers"] = _moe_layers(fields, shape["num_layers"])
    return shape


def _has_experts(fields: Fields) -> bool:
    return any(fields.values.get(name) for name in _EXPERTS)


def _experts(fields: Fields) -> dict[str, int]:
    topk = fields.count(*_TOPK)
    experts = fields.count(*_EXPERTS)
    fields.agree(*_TOPK)
    fields.agree(*_EXPERTS)
    if topk > experts > 0:
        fields.fault(_TOPK[0], f"must not exceed the number of experts: {topk} of {experts}")
    return {"topk": topk, "num_experts": experts, "moe_inter_size": fields.count(*_EXPERT_SIZE)}


def _moe_layers(fields: Fields, layers: int) -> int:
    """Layers with routed experts: the first ones are dense, and of the rest every `moe_layer_freq`-th has them."""
    dense = fields.count("first_k_dense_replace", required=False, least=0)
    frequency = fields.count("moe_layer_freq", required=False) or 1
    if dense > layers > 0:
        fields.fault("first_k_dense_replace", f"must not exceed num_hidden_layers: {dense} of {layers}")
    return sum(1 for layer in range(dense, layers) if layer % frequency == 0)
