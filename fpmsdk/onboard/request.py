"""One onboarding request: a model on its hardware, the worker that is measured, and optionally its profile.

The request is the identity of everything that follows from it, so that what an older release wrote is written again
byte for byte. Source: onboarding.md section 2.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_serializer, model_validator

from fpmsdk.collect.topology import Topology
from fpmsdk.config.profile import DeploymentProfile, FpmModelProfile, Resources
from fpmsdk.config.profile_identity import select_deployment
from fpmsdk.documents.canonical import digest
from fpmsdk.documents.strict import StrictDocument, checked
from fpmsdk.documents.yaml_files import read_mapping, write_yaml
from fpmsdk.errors import OnboardError
from fpmsdk.onboard.choices import WorkerType
from fpmsdk.onboard.collection_settings import collection_settings
from fpmsdk.onboard.request_sections import (
    DEFAULT_MAX_BATCH_SIZE,
    DEFAULT_MAX_NUM_TOKENS,
    REFERENCE_CONTEXT_TOKENS,
    ROLE_GRAPH_FIELDS,
    TOPOLOGY_FIELDS,
    CollectionSection,
    ExampleWorkload,
    RequestIdentity,
    SearchSection,
)

SCHEMA: Literal["aisimulate-support-request/v2"] = "aisimulate-support-request/v2"
_FIRST_SCHEMA = "aisimulate-support-request/v1"
# What the first schema meant by a request without a context limit.
_FIRST_CONTEXT_TOKENS = 16_384
_OBSOLETE = {"identity": ("gpu_count", "node_count", "gpus_per_node"), "search": ("max_candidates",)}


class SupportRequest(StrictDocument):
    """A request, whole: its sections and the rules between them.

    Read one with `load_request`. `worker_type` is the serving role; None is a request from before roles existed,
    which measures both phases under shared settings.

    Source: onboarding.md section 2.

    >>> identity = {"model": "org/model", "model_revision": "rev-1", "model_kind": "dense", "gpu": "h200_sxm",
    ...             "interconnect": "nvswitch"}
    >>> request = SupportRequest(identity=identity, search={"tensor_parallel": 2, "context_length": 8192})
    >>> request.worker_gpus, request.parallel_preset, request.collection_phases
    (2, 'tp', ('prefill', 'decode'))
    >>> request.scheduler_limits()
    {'max_batched_tokens': 8192, 'max_sequences': 256}
    """

    schema_version: Literal["aisimulate-support-request/v2"] = SCHEMA
    identity: RequestIdentity
    workload: ExampleWorkload = Field(default_factory=ExampleWorkload)
    search: SearchSection = Field(default_factory=SearchSection)
    collection: CollectionSection = Field(default_factory=CollectionSection)
    fpm_profile: FpmModelProfile | None = None
    worker_type: WorkerType | None = None

    @model_serializer(mode="wrap")
    def _write(self, write: Any) -> dict[str, Any]:
        document: dict[str, Any] = write(self)
        if self.worker_type is None:
            document.pop("worker_type", None)  # older requests keep their bytes
        return document

    @model_validator(mode="before")
    @classmethod
    def _as_second_schema(cls, document: Any) -> Any:
        if not isinstance(document, Mapping):
            return document
        document = dict(document)
        for name in ("identity", "search"):
            if isinstance(document.get(name), Mapping):
                document[name] = dict(document[name])
        _refuse_obsolete(document)
        search = document.setdefault("search", {})
        if document.get("schema_version") == _FIRST_SCHEMA:
            document["schema_version"] = SCHEMA
            if isinstance(search, dict):
                search.setdefault("context_length", _FIRST_CONTEXT_TOKENS)
        profile = document.get("fpm_profile")
        if profile is not None:
            _complete_from_profile(document, profile)
        return document

    @model_validator(mode="after")
    def _consistent(self) -> SupportRequest:
        if self.worker_type is None and self.collection.has_role_graphs:
            raise ValueError(f"{', '.join(ROLE_GRAPH_FIELDS)} belong to one serving role; add worker_type")
        self._check_topology()
        needed = self.workload.input_tokens + self.workload.output_tokens
        if needed > self.search.context_length:
            raise ValueError(
                f"search.context_length {self.search.context_length} must cover the example's {needed} input and "
                "output tokens; raise it or shorten the example"
            )
        if self.fpm_profile is not None:
            self._check_profile(self.fpm_profile)
        return self

    def _check_topology(self) -> None:
        tensor, data, moe_tensor, expert = self.topology_sizes()
        if self.identity.model_kind == "dense":
            valid = data == moe_tensor == expert == 1
        else:
            pure_tp = data == expert == 1 and moe_tensor == tensor
            dep = tensor == moe_tensor == 1 and expert == data
            tep = data == moe_tensor == 1 and expert == tensor
            valid = pure_tp or dep or tep
        if not valid:
            sizes = dict(zip(TOPOLOGY_FIELDS, (tensor, data, moe_tensor, expert), strict=True))
            raise ValueError(
                f"the topology of a {self.identity.model_kind} model must be complete TP, DEP or TEP (dense: TP), "
                f"found {sizes}; set all four sizes"
            )

    def _check_profile(self, profile: FpmModelProfile) -> None:
        deployment = self.profile_deployment()
        assert deployment is not None
        if self.worker_type is not None and deployment.worker_type != self.worker_type:
            raise ValueError(
                f"worker_type {self.worker_type} needs a deployment of fpm_profile with the same worker_type, found "
                f"{deployment.worker_type}; a profile shared by both phases is no evidence of one role"
            )
        limits = self.scheduler_limits()
        _check_envelope(deployment.resources, limits["max_batched_tokens"], limits["max_sequences"])
        if self.identity.model_revision != profile.model_revision:
            raise ValueError(
                f"identity.model_revision {self.identity.model_revision!r} must be that of fpm_profile, "
                f"{profile.model_revision!r}"
            )
        if (profile.num_experts > 0) != (self.identity.model_kind == "moe"):
            raise ValueError(
                f"identity.model_kind {self.identity.model_kind} contradicts fpm_profile.num_experts "
                f"{profile.num_experts}"
            )
        if self.search.context_length > profile.context_length:
            raise ValueError(
                f"search.context_length {self.search.context_length} exceeds fpm_profile.context_length "
                f"{profile.context_length}; lower it"
            )

    # --- what follows from the sections ---

    def topology_sizes(self) -> tuple[int, int, int, int]:
        """Resolved sizes of `TOPOLOGY_FIELDS`: attention TP and DP, TP and EP of the experts."""
        search = self.search
        moe_tensor = search.tensor_parallel if self.identity.model_kind == "moe" else 1
        return (
            search.tensor_parallel,
            search.attention_data_parallel or 1,
            search.moe_tensor_parallel or moe_tensor,
            search.moe_expert_parallel or 1,
        )

    def parallelism(self) -> dict[str, int]:
        """The topology under the names of a generated configuration; one replica, no pipeline."""
        tensor, data, moe_tensor, expert = self.topology_sizes()
        return {
            "replicas": 1,
            "tensor": tensor,
            "pipeline": 1,
            "attention_data": data,
            "moe_tensor": moe_tensor,
            "moe_expert": expert,
        }

    @property
    def topology(self) -> Topology:
        """The topology as the collector's plans state it."""
        tensor, data, moe_tensor, expert = self.topology_sizes()
        return Topology(tp=tensor, dp=data, moe_tp=moe_tensor, moe_ep=expert)

    @property
    def worker_gpus(self) -> int:
        """GPUs of the one worker that is measured; says nothing of what is available."""
        tensor, data, _, _ = self.topology_sizes()
        return tensor * data

    @property
    def parallel_preset(self) -> Literal["tp", "pure_tp", "dep", "tep"]:
        """Family of the topology, as the collector names it."""
        _, data, _, expert = self.topology_sizes()
        if self.identity.model_kind == "dense":
            return "tp"
        if data > 1:
            return "dep"
        return "tep" if expert > 1 else "pure_tp"

    @property
    def collection_phases(self) -> tuple[str, ...]:
        """Phases that a campaign measures: that of a single role, else both."""
        return (self.worker_type,) if self.worker_type in ("prefill", "decode") else ("prefill", "decode")

    def profile_deployment(self) -> DeploymentProfile | None:
        """The deployment of the profile that this request is about; None without a profile.

        Raises: `ConfigError` when the profile holds none.
        """
        if self.fpm_profile is None:
            return None
        tensor, data, moe_tensor, expert = self.topology_sizes()
        return select_deployment(
            self.fpm_profile,
            {
                "model": self.identity.model,
                "system": self.identity.gpu,
                "backend": self.identity.framework,
                "backend_version": self.identity.framework_version,
                "tp": tensor,
                "pp": 1,
                "attention_dp": data,
                "moe_tp_size": moe_tensor,
                "moe_ep_size": expert,
                "worker_type": self.worker_type or "aggregated",
            },
        )

    def pricing_identity(self, deployment: DeploymentProfile) -> dict[str, Any]:
        """What a forward-pass configuration says of a deployment of the profile, and the profile itself."""
        assert self.fpm_profile is not None
        return {
            "model": self.identity.model,
            "system": self.identity.gpu,
            "backend": self.identity.framework,
            "backend_version": self.identity.framework_version,
            "worker_type": self.worker_type or "aggregated",
            "tp": deployment.tp,
            "pp": deployment.pp,
            "attention_dp": deployment.dp,
            "moe_tp_size": deployment.moe_tp,
            "moe_ep_size": deployment.moe_ep,
            "fpm_profile": self.fpm_profile.model_dump(mode="json"),
        }

    def profile_of(self, model: Mapping[str, Any], deployment: Mapping[str, Any], where: str) -> FpmModelProfile:
        """A profile of this request's model with its one deployment.

        Parameters
        ----------
        model: architecture, context length, experts and provenance.
        deployment: precision and resources, and what else the request does not say.
        where: what it was made from, for the message.

        Raises
        ------
        OnboardError: with one line for every faulty field.
        """
        tensor, data, moe_tensor, expert = self.topology_sizes()
        known = {
            "system": self.identity.gpu,
            "backend": self.identity.framework,
            "backend_version": self.identity.framework_version,
            "tp": tensor,
            "dp": data,
            "moe_tp": moe_tensor,
            "moe_ep": expert,
        }
        document = {
            "schema_version": 1,
            "model": self.identity.model,
            "model_revision": self.identity.model_revision,
            **model,
            "deployments": [{**known, **deployment}],
        }
        return checked(FpmModelProfile, document, where)

    def scheduler_limits(self) -> dict[str, int]:
        """`max_batched_tokens` and `max_sequences` of one rank: the request's, else the profile's, else defaults.

        Raises: `OnboardError` when there is not a token for every sequence.
        """
        deployment = self.profile_deployment()
        tokens, sequences = self.collection.max_num_tokens, self.collection.max_batch_size
        if deployment is not None:
            tokens = tokens or deployment.resources.max_num_tokens
            sequences = sequences or deployment.resources.max_batch_size
        tokens, sequences = tokens or DEFAULT_MAX_NUM_TOKENS, sequences or DEFAULT_MAX_BATCH_SIZE
        if tokens < sequences:
            raise OnboardError(
                f"collection: max_num_tokens {tokens} must be at least max_batch_size {sequences}; raise the one or "
                "lower the other",
                "collection.max_num_tokens",
            )
        return {"max_batched_tokens": tokens, "max_sequences": sequences}

    def collection_settings(self) -> dict[str, Any]:
        """Resolved limits and graph policy of the measured engine, with where each value comes from (`sources`)."""
        return collection_settings(self)

    # --- written forms ---

    def document(self) -> dict[str, Any]:
        """The request as plain values in field order, without what is unset."""
        return self.model_dump(mode="json", exclude_none=True)

    def yaml_bytes(self) -> bytes:
        """The file form of the request."""
        return write_yaml(self.document())

    def replaced(self, document: Mapping[str, Any], where: str = "request") -> SupportRequest:
        """This request with the given fields replaced, sections merged key by key; None removes a key.

        Raises: `OnboardError` when the outcome is no request; `where` is named.
        """
        merged = self.document()
        for name, value in document.items():
            if isinstance(value, Mapping) and name != "fpm_profile":
                section = {**merged.get(name, {}), **value}
                merged[name] = {key: item for key, item in section.items() if item is not None}
            elif value is None:
                merged.pop(name, None)
            else:
                merged[name] = value
        return checked(SupportRequest, merged, where)


def _refuse_obsolete(document: Mapping[str, Any]) -> None:
    found = [
        f"{section}.{name}"
        for section, names in _OBSOLETE.items()
        if isinstance(document.get(section), Mapping)
        for name in names
        if name in document[section]
    ]
    if found:
        raise ValueError(
            f"{', '.join(found)} are of an older release; copy the request without them and plan in a new directory. "
            "Replicas and GPU budgets belong into predict and recommend configurations"
        )


def _complete_from_profile(document: dict[str, Any], profile: Any) -> None:
    """Fill in what a request may leave to its profile: the context limit and the version label."""
    if isinstance(profile, FpmModelProfile):
        profile = profile.model_dump(mode="json")
    if not isinstance(profile, Mapping):
        return
    search, identity = document["search"], document.get("identity")
    context = profile.get("context_length")
    if isinstance(search, dict) and "context_length" not in search and type(context) is int:
        search["context_length"] = min(context, REFERENCE_CONTEXT_TOKENS)
    deployments = profile.get("deployments")
    if isinstance(identity, dict) and identity.get("framework_version") is None and isinstance(deployments, list):
        place = (identity.get("gpu"), identity.get("framework", "vllm"))
        found = [entry for entry in deployments if isinstance(entry, Mapping)]
        labels = {str(entry.get("backend_version")) for entry in found if _place(entry) == place} - {"None"}
        if len(labels) > 1:
            raise ValueError(
                f"identity.framework_version is missing and fpm_profile has several: {', '.join(sorted(labels))}; "
                "name one"
            )
        if labels:
            identity["framework_version"] = labels.pop()


def _place(deployment: Mapping[str, Any]) -> tuple[Any, Any]:
    return deployment.get("system"), deployment.get("backend")


def _check_envelope(resources: Resources, max_num_tokens: int, max_batch_size: int) -> None:
    for name, asked in (("max_num_tokens", max_num_tokens), ("max_batch_size", max_batch_size)):
        bound = getattr(resources, name)
        if resources.runtime_memory is not None and asked != bound:
            raise ValueError(
                f"collection.{name} {asked} must be the {bound} under which fpm_profile's memory was observed; probe "
                "again for other scheduler limits"
            )
        if asked > bound:
            raise ValueError(f"collection.{name} {asked} exceeds the bound of fpm_profile, {bound}; lower it")


def load_request(path: str | os.PathLike[str]) -> SupportRequest:
    """Read the request of a YAML or JSON file.

    Raises
    ------
    OnboardError: no such document, or one line for every faulty field; names the file.
    OSError: it cannot be read.

    Source: onboarding.md section 2.
    """
    return checked(SupportRequest, read_mapping(path), os.fspath(path))


def request_id(request: SupportRequest) -> str:
    """Identity of what is collected: the request without its example, objective and seed.

    Source: onboarding.md section 5.
    """
    document = request.document()
    del document["workload"]
    for name in ("objective", "seed"):
        del document["search"][name]
    return f"onboarding-{digest(document)}"


def validation_id(request: SupportRequest) -> str:
    """Identity of the whole request, example included.

    Source: onboarding.md section 5.
    """
    return f"validation-{digest(request.document())}"
