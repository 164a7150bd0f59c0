"""The cluster's configuration: frozen, every field with unit, range and default. Loaded once; a constructor gets its own part."""

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, ModelWrapValidatorHandler, SecretStr, ValidationError, model_validator

from core.config.adapter_config import AdapterConfig, Adapters
from core.config.answer_formats import ReasoningFormat, ToolFormat
from core.config.cluster_rules import RULES
from core.config.config_section import Section
from core.config.config_words import sentence
from core.config.device_steps import with_steps_of_device
from core.config.image_config import ImageConfig
from core.config.jwt_config import JwtConfig
from core.config.live_config import LimitsConfig, LiveConfig, SloClasses, TenantConfig, TenantName
from core.config.mail_config import MailConfig
from core.config.model_rows import ModelName, WrittenRows, check_models, tree_of
from core.config.parallel_config import ParallelConfig
from core.config.residency_config import ResidencyConfig, ResidencyGroup
from core.config.residency_groups import check_groups
from core.config.security_config import SecurityConfig
from core.config.serve_config import ServeConfig
from core.config.tuning_config import TuningChanges
from core.errors import ConfigError
from core.types import Slo

ENV_PREFIX = "BATON_"
_SECRETS = frozenset({"api_keys", "cluster_key", "keys"})


C = TypeVar("C", bound=BaseModel)


class ModelConfig(Section):
    path: str = "embedded"
    """A Hugging Face folder or hub id, or a GGUF file; `embedded` is the model that ships with Baton."""
    name: str = ""
    """The name clients use; empty: the folder's or hub id's own."""
    aliases: tuple[str, ...] = ()
    """More names by which clients may ask for it."""
    adapters: Adapters = {}  # noqa: RUF012 - pydantic copies defaults
    """LoRA adapters, each a folder that PEFT has written, by the name that a request's `model` then gives."""
    implementation: Literal["auto", "baton", "transformers"] = "auto"
    """Whose code computes the model's layers; `auto`: Baton's own, or that of transformers where Baton has none."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`auto`: the folder's safetensors files. `dummy`: random weights, for measurements; the folder needs no files of weights."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: the checkpoint's on GPUs; on CPUs float32, with matrices as they are stored, and rows rounded for bfloat16's where
    that is quicker. `float16` is exact for checkpoints of float16, and ends at 65,504."""
    quantization: Literal["none", "fp8", "int8", "int4", "nvfp4"] = "none"
    """What the matrices of a full-precision checkpoint are rounded to as they are read. What multiplies them is rounded to 8
    bits, but for `fp8` on CPUs, where it is float32 and saves nothing, and for `int4` and `nvfp4` on GPUs."""
    packed_cache: Literal["auto", "none"] | Annotated[str, Field(title="PATH", min_length=1)] = "auto"
    """The folder in which CPUs store packed weights, so that all instances of a host have one copy of them and a later start
    packs none. `auto`: `~/.cache/baton/weights`, for checkpoints of 128 MiB and more, on a local disk and not in a pod. `none`:
    each instance has its own."""
    max_context_tokens: int = Field(default=0, ge=0)
    """Prompt and output together; 0: what the model was made for."""
    tool_call_parser: Literal["auto", ToolFormat] = "auto"
    """The markup in which the model calls tools; `auto`: what its chat template shows."""
    reasoning_parser: Literal["auto", ReasoningFormat] = "auto"
    """The markup around the model's reasoning; `auto`: what its chat template shows."""
    pooling: Literal["auto", "none", "last", "mean", "cls"] = "auto"
    """What `/v1/embeddings` makes a vector of: the hidden state of the last, of all or of the first token (cls). `auto`: what the
    files of sentence-transformers beside the checkpoint say; with them the model embeds and does not generate."""


class EngineConfig(Section):
    block_size: int = Field(default=16, ge=1, le=256)
    """Tokens of one KV block."""
    num_blocks: int = Field(default=0, ge=0)
    """KV blocks of one instance; 0: as many as `kv_bytes` holds."""
    kv_bytes: int = Field(default=0, ge=0)
    """Memory for one instance's KV pool, in bytes, when `num_blocks` is 0. 0: what `memory_utilization` leaves beside weights and
    the largest step; on CPUs half of that, and no more than all sequences at their longest need."""
    memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that instances may use; on CPUs share of the host's, divided among the ranks for which it has
    processors, as far as it is free."""
    kv_dtype: Literal["auto", "float8", "int8"] = "auto"
    """What keys and values are stored as; `auto`: what the model computes in, but bfloat16 on CPUs that multiply it faster and
    round rows to it. 8 bits come with a scale for each vector."""
    max_batch_tokens: int = Field(default=512, ge=1)
    """Tokens computed in one step: the budget that chunked prefill fills. Unless set, 8192 on GPUs."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences in one step. Unless set, 512 on GPUs."""
    lookahead: bool = True
    """Plan the next step while one runs."""
    speculate: (
        Literal["none", "ngram", "mtp"]
        | Annotated[str, Field(title="draft:PATH", pattern="^draft:.+")]
        | Annotated[str, Field(title="eagle:PATH", pattern="^eagle:.+")]
    ) = "none"
    """How to propose a sequence's next tokens, so that one step may sample several: `ngram` by what followed its last few tokens
    before, `draft:PATH` by a small model with the same vocabulary, a folder or a hub id, `mtp` by the layer for multi-token
    prediction of DeepSeek-V3, GLM-4-MoE and Qwen3-Next, `eagle:PATH` by an EAGLE-3 head that was made for the model. No answer
    changes by it."""
    speculate_tokens: int = Field(default=8, ge=1, le=64)
    """Draft tokens of one sequence in one step at the most; there are fewer the less they gain."""
    prefix_cache: bool = True
    """Keep the KV of ended sequences for prompts that begin alike; what was not used for longest is given up first."""
    pinned_share: float = Field(default=0.5, ge=0, le=1)
    """The share of an instance's KV blocks that all tenants together may keep there by asking for it (`cache_hints`). Each tenant
    has a part of it by its `weight`. Sequences that run get these blocks, too, when no others are left."""
    longest_pin_s: float = Field(default=3600.0, ge=0)
    """No request's KV is kept for longer after its end because the client asked for it."""
    host_cache_bytes: int = Field(default=0, ge=0)
    """Host memory of one instance for KV of prefixes that its pool has no room for; 0: none."""
    longest_pause_s: float = Field(default=5.0, ge=0, le=60)
    """A sequence that is ahead of its class's pace may sit out for so long while others have its blocks, if `host_cache_bytes`
    keeps its KV; 0: none sits out."""
    disk_cache_bytes: int = Field(default=0, ge=0)
    """The same on a local disk, below the host memory; it survives a restart. 0: none."""
    disk_cache_path: str = ""
    """Folder of the disk cache; instances on one host may share it, each takes a file of its own."""
    num_threads: int = Field(default=0, ge=0)
    """Compute threads of one rank on a CPU; 0: the physical cores that it may use, divided among the ranks on its host, at most
    `BATON_MAX_THREADS` of the environment. Where others compute on these cores, two may be many times slower than one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where an instance computes; `auto`: on the first GPU that its process sees, or on the CPU without one."""
    kernels: Literal["auto", "triton", "torch", "flashinfer", "flash_attention"] = "auto"
    """Which operations run on a GPU; `auto`: Triton's where it is installed, and attention by FlashInfer or FlashAttention where
    they are installed and measured to be faster; either name forces that one for attention. CPUs have PyTorch's."""
    cuda_graphs: Literal["auto", "none"] | tuple[Annotated[int, Field(ge=1)], ...] = "auto"
    """Numbers of tokens for which a step's launches are captured as a CUDA graph; fewer are padded to the next one.
    `auto`: some up to 2048, or `max_num_seqs`, on a GPU whose kernels can be captured; `none`: no step is."""
    step_grace_s: float = Field(default=0.0, ge=0)
    """A step that takes so many seconds longer than its instance has learned to expect counts as hung. The instance is then lost,
    and its requests go on elsewhere. 0: `mail.peer_timeout_s`."""
    profile: str = ""
    """File of `baton profile`, measured with this model: how long steps take until an instance has learned it from its own."""
    deterministic: bool = False
    """Logits have the same bits whatever a request is batched with and however its prompt is chunked; slower."""

    @model_validator(mode="wrap")
    @classmethod
    def _with_steps(cls, given: Any, validated: ModelWrapValidatorHandler[Self]) -> Self:
        return with_steps_of_device(given, validated)


class TransferConfig(Section):
    transport: Literal["auto", "shm", "tcp", "nixl", "nccl", "cuda_ipc", "loopback"] = "auto"
    """`auto`: of shared memory, TCP and (on hosts with RDMA) NIXL the one that is measured to be the fastest between two
    instances; loopback within a process."""
    tcp_streams: int = Field(default=0, ge=0, le=32)
    """TCP connections from one instance to another; 0: four, or as many as there are cores if those are fewer."""
    checksum: bool = False
    """CRC-32 over each chunk of KV, compared where it arrives; a damaged one is sent once more."""
    grant_ttl_s: float = Field(default=120.0, gt=0)
    """How long a prefill instance may take for a prompt before it is told to stop and another one is asked."""
    kv_replicas: int = Field(default=0, ge=0, le=1)
    """1: sealed decode blocks are copied to another decode instance's host memory, so that a lost instance's requests go on there
    without computing their KV again. Needs `engine.host_cache_bytes`."""
    drain_timeout_s: float = Field(default=30.0, gt=0)
    """How long to wait for a writer's Drained before its connection is cut (a fence)."""


class ScheduleConfig(Section):
    max_queued_requests: int = Field(default=1024, ge=1)
    """Requests that wait for a place; one more is refused with 429."""
    max_queue_wait_s: float = Field(default=60.0, gt=0)
    """Predicted or actual waiting beyond this is refused with 429; a class whose first token may take longer has that long."""
    aging_s: float = Field(default=10.0, ge=0)
    """A tenant's requests of one class rank one priority higher for each time so long in which none was placed; 0: never."""
    local_threshold_tokens: int = Field(default=32, ge=0)
    """Uncached prompt tokens up to which decode computes the prompt itself, however busy it is, while it has a slot."""
    link_bytes_per_s: float = Field(default=1.2e9, gt=0)
    """What KV is taken to move at, in bytes per second, between hosts whose network cards are not known, until some has been
    moved; `baton doctor` measures it."""
    report_interval_s: float = Field(default=0.05, gt=0)
    """How often instances report their load while they are busy."""
    fairness_slack: float = Field(default=0.0, ge=0)
    """How much more than the least served tenant, by weight, one may get for which more waits; 0: shares are as the weights."""
    record_path: str = ""
    """File to which the scheduler writes everything it is told and decides, begun anew at each start, which puts `.before` behind
    the name of the last one; `baton replay` reads it. On Ray each scheduler, a spare too, has its own: the path,
    a dot and its address."""
    tuning: TuningChanges = {}  # noqa: RUF012 - pydantic copies defaults
    """Other values for [constants of placement](architecture/placement.md), in the scheduler and in instances. A release may
    change or drop a constant; an unknown one is refused."""
    shadow_tuning: TuningChanges = {}  # noqa: RUF012 - pydantic copies defaults
    """The same on top of `tuning`, tried without acting on it: for each placement the scheduler also works out where it would go
    then, and writes that to `record_path`. A decision then takes twice as long."""
    residency: ResidencyConfig = ResidencyConfig()


class ScalingConfig(Section):
    """Pools that grow and shrink with their load."""

    enabled: bool = False
    """Sizes begin as configured and follow the load. In a Serve file the application needs `external_scaler_enabled: true`."""
    interval_s: float = Field(default=5.0, gt=0)
    """Between two looks at the load."""
    prefill_min: int = Field(default=1, ge=1)
    """Prefill instances at the least."""
    prefill_max: int = Field(default=64, ge=1)
    """Prefill instances at the most."""
    decode_min: int = Field(default=1, ge=1)
    """Decode instances at the least."""
    decode_max: int = Field(default=64, ge=1)
    """Decode instances at the most."""
    target: float = Field(default=0.7, gt=0, le=1)
    """Share of a pool's time, blocks or slots that it is sized for."""
    shrink_below: float = Field(default=0.5, gt=0, le=1)
    """Share that the smaller pool may have in use when one instance is taken away; less than `target`."""
    calm_s: float = Field(default=60.0, gt=0)
    """How long that must have been so, each time."""
    cold_start_s: float = Field(default=60.0, gt=0)
    """From the decision until a new instance serves, until it has been measured."""


class FleetConfig(Section):
    """What the instances and schedulers of one model go by. Each row of `models` may have its own."""

    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    adapters: AdapterConfig = AdapterConfig()
    scaling: ScalingConfig = ScalingConfig()
    prefill: ParallelConfig = ParallelConfig()
    decode: ParallelConfig = ParallelConfig()
    prefill_instances: int = Field(default=1, ge=0)
    """Instances that compute prompts alone."""
    decode_instances: int = Field(default=1, ge=1)
    """Instances that generate, and compute the prompts that are not worth handing over."""
    any_role: bool = False
    """The decode instances compute prompts for each other, too: the scheduler says for each request who does what.
    `prefill_instances` must be 0."""
    cpus_per_instance: float = Field(default=0.25, gt=0)
    """What each rank of an instance asks of Ray; it does not bound its threads."""
    slo_classes: SloClasses = {  # noqa: RUF012 - pydantic copies defaults
        "interactive": Slo(name="interactive", ttft_s=0.45, tpot_s=0.04, priority=2),
        "chat": Slo(name="chat", ttft_s=1.0, tpot_s=0.05, priority=1),
        "standard": Slo(),
        "long-context": Slo(name="long-context", ttft_s=10.0, tpot_s=0.1, priority=0),
        "batch": Slo(name="batch", ttft_s=3600.0, tpot_s=10.0, priority=-1),
    }
    """Service classes: targets for the first token and for each further one in seconds, priority, weight, and what happens to a
    prompt that cannot keep them. A class that names no target is served in the order of arrival."""

    def cpus_of(self, pool: ParallelConfig) -> float:
        """What an instance of this pool asks of Ray; its ranks are processes within its share."""
        return self.cpus_per_instance * pool.num_ranks


class ModelRow(FleetConfig):
    """One model of several. Its values replace the rest of the configuration's for this model."""

    path: str = ""
    """As `model.path`."""
    aliases: tuple[str, ...] = ()
    """As `model.aliases`."""
    slo_classes: SloClasses = {}  # noqa: RUF012 - pydantic copies defaults
    """Targets of this model's own for classes of `slo_classes`."""


class ClusterConfig(FleetConfig):
    models: Annotated[Mapping[ModelName, ModelRow], WrittenRows, Field(title="NAME=PATH")] = {}
    """Several models behind one port, instead of `model.path`: the name that clients use, and a path or keys of its own."""
    residency_groups: Mapping[ModelName, ResidencyGroup] = {}
    """Groups of models that share memory, which holds only some of them. A row names its own in `schedule.residency.group`."""
    mail: MailConfig = MailConfig()
    security: SecurityConfig = SecurityConfig()
    jwt: JwtConfig = JwtConfig()
    serve: ServeConfig = ServeConfig()
    pictures: ImageConfig = ImageConfig()
    ingress_instances: int = Field(default=1, ge=1)
    """Processes that listen for HTTP."""
    cluster_key: SecretStr | None = None
    """Shared secret of the cluster's processes; None: one is made for each Ray cluster."""
    tenants: Mapping[TenantName, TenantConfig] = {}
    """Who holds certain keys, and what they may ask."""
    model_limits: Mapping[str, LimitsConfig] = {}
    """What all clients together may ask of each model or adapter, by name."""

    @property
    def num_spare_schedulers(self) -> int:
        """Processes of schedulers beyond `serve.schedulers`. Several schedulers cover for each other, and a single one needs a
        spare. A model of a group has one alone, which speaks for it to its group."""
        return 1 if self.serve.schedulers == 1 and not self.schedule.residency.group else 0

    @property
    def num_scheduler_processes(self) -> int:
        """All processes of one model's schedulers, a spare among them."""
        return self.serve.schedulers + self.num_spare_schedulers

    @property
    def rows(self) -> tuple["ClusterConfig", ...]:
        """The configuration of each model, as if it were served alone; where there is no table, this one."""
        if not self.models:
            return (self,)
        return tuple(ClusterConfig.model_validate(tree_of(self, name)) for name in self.models)

    @property
    def only(self) -> "ClusterConfig":
        """The configuration of the only model, for what can have no more. Raises ConfigError."""
        if len(self.models) > 1:
            raise ConfigError(f"this takes one model, and models has {', '.join(self.models)}: leave one")
        return self.rows[0]


def overlay(config: ClusterConfig, content: Mapping[str, Any]) -> ClusterConfig:
    """`config` with the service classes and tenants of `content` beside or in place of its own. Raises ConfigError."""
    if unknown := [name for name in content if name not in LiveConfig.model_fields]:
        known = ", ".join(LiveConfig.model_fields)
        raise ConfigError(f"{unknown[0]!r} cannot change while the server runs; only these can: {known}")
    live = _validated(LiveConfig, {name: value or {} for name, value in content.items()})
    changed = {
        "slo_classes": {**config.slo_classes, **live.slo_classes},
        "tenants": {**config.tenants, **live.tenants},
        "model_limits": {**config.model_limits, **live.model_limits},
    }
    return _consistent(config.model_copy(update=changed))


def load(
    content: Mapping[str, Any] | None,
    env: Mapping[str, str],
    overrides: Mapping[str, Any] | None = None,
) -> ClusterConfig:
    """The configuration from a YAML file's content, then `BATON_SECTION__FIELD` (or `BATON_FIELD`) variables, then `overrides`
    (dotted keys). Other variables that begin with BATON_ mean nothing here.

    Raises ConfigError, in one line, naming the key."""
    values: dict[str, Any] = deepcopy(dict(content or {}))
    for name, text in env.items():
        keys = name.removeprefix(ENV_PREFIX).lower().split("__")
        if name.startswith(ENV_PREFIX) and (len(keys) > 1 or keys[0] in ClusterConfig.model_fields):
            _put(values, keys, text if keys == ["cluster_key"] else _parse(text))
    for dotted, value in (overrides or {}).items():
        _put(values, dotted.split("."), value)
    return _consistent(_validated(ClusterConfig, values))


def _validated(kind: type[C], values: Mapping[str, Any]) -> C:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        secret = bool(_SECRETS.intersection(first["loc"]))
        raise ConfigError(sentence(kind, first, secret=secret)) from None


def _consistent(config: ClusterConfig) -> ClusterConfig:
    """Check keys that need each other. Raises ConfigError."""
    for check in (check_models, check_groups, *RULES):
        check(config)
    for name, row in zip(config.models, config.rows, strict=False):
        try:
            _consistent(row)
        except ConfigError as error:
            raise ConfigError(f"models.{name}: {error}") from None
    return config


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _put(values: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        values = values.setdefault(key, {})
    values[keys[-1]] = value
