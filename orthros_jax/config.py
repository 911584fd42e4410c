"""The settings of a run: frozen dataclasses, one section each, and the checks that cross fields.

A YAML file under configs/ states only what differs from these defaults. The string under each field is its
help text. `orthros_jax.config_reader` turns files and command-line overrides into a `Config`.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from orthros_jax.errors import UserError


class ConfigError(UserError):
    """A setting that is wrong by itself or together with another one.

    Attributes:
      key: dotted name of the setting, for example "model.num_heads".
      problem: what is wrong and how to repair it.

    `source` says where the setting was given, for example "configs/quickstart.yaml:7" or "command line".
    """

    def __init__(self, key: str, problem: str, source: str = ""):
        super().__init__(": ".join(part for part in (source, key, problem) if part))
        self.key = key
        self.problem = problem


def _require(condition: bool, key: str, message: str) -> None:
    if not condition:
        raise ConfigError(key, message)


@dataclass(frozen=True)
class ModelConfig:
    """Shape and numerics of the model. The defaults are the 160M preset."""

    kind: Literal["orthros", "transformer", "sliding_window"] = "orthros"
    """Orthros (two streams), or a single-stream baseline with full or sliding-window attention."""
    vocab_size: int = 32000
    """Number of token ids V."""
    num_layers: int = 12
    """Number of layers L."""
    model_dim: int = 768
    """Width of the residual stream D."""
    num_heads: int = 12
    """Query heads N."""
    num_kv_heads: int = 12
    """Key and value heads K; K divides N (grouped-query attention when smaller)."""
    head_dim: int = 64
    """Head size H, independent of model_dim / num_heads."""
    ffn_dim: int = 3072
    """Hidden width F of the SwiGLU feed-forward network."""
    window: int = 128
    """Sliding-window size W in keys, the query's own key included (kinds orthros and sliding_window)."""
    output_window: int | None = None
    """Keys that an output row sees, its own included; null is full causal attention (kind orthros)."""
    query_sharing: Literal["scale_offset", "shared", "separate"] = "scale_offset"
    """How the streams share the query projection: with a scale and offset each, as it is, or not at all."""
    scale_offset_position: Literal["after_norm", "before_norm"] = "after_norm"
    """Whether scale and offset follow or precede the query normalisation (matters with qk_norm only)."""
    qk_norm: bool = False
    """RMS normalisation of queries and keys per head, as in Qwen3."""
    tie_embeddings: bool = False
    """Use the embedding matrix as output head."""
    norm_eps: float = 1e-6
    """Epsilon of every RMS normalisation."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: Literal["none", "llama3"] = "none"
    """Frequency scaling for long contexts."""
    rope_factor: float = 8.0
    """llama3 scaling: divisor of the low frequencies."""
    rope_low_frequency_factor: float = 1.0
    """llama3 scaling: wavelengths above original length / this are divided by the factor."""
    rope_high_frequency_factor: float = 4.0
    """llama3 scaling: wavelengths below original length / this stay as they are."""
    rope_original_length: int = 8192
    """llama3 scaling: sequence length that the frequencies were trained with."""
    max_sequence_length: int = 8192
    """Longest sequence the model is meant for; longer data is refused."""
    init_std: float = 0.02
    """Standard deviation of the normal initialisation of all matrices."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the parameters."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of activations and matrix products."""
    statistics_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of normalisation statistics and of the loss's logits; attention's softmax is always float32."""
    attention_impl: Literal["auto", "hopper", "tpu", "cudnn", "xla"] = "auto"
    """Attention backend; auto takes the fastest one that supports the case and logs its choice."""
    remat: Literal["none", "save_dots", "save_attention", "full"] = "none"
    """What the backward pass recomputes: nothing, all but matrix products or attention outputs, or all."""
    float8: bool = False
    """Make the matrix products of the layers in float8, with scales of each tensor; the head stays as it is."""
    unroll: int = 1
    """Hidden layers in each turn of the loop over them; num_layers - 1 leaves no loop: faster, longer to compile."""

    def __post_init__(self):
        sizes = ("vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim", "unroll")
        for name in (*sizes, "window", "max_sequence_length", "rope_original_length"):
            _require(getattr(self, name) > 0, f"model.{name}", f"must be positive, got {getattr(self, name)}")
        for name in ("norm_eps", "rope_base", "rope_factor", "rope_low_frequency_factor", "init_std"):
            _require(getattr(self, name) > 0, f"model.{name}", f"must be positive, got {getattr(self, name)}")
        _require(
            self.output_window is None or self.output_window > 0,
            "model.output_window",
            f"must be positive or null (full attention), got {self.output_window}",
        )
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "model.num_kv_heads",
            f"{self.num_kv_heads} does not divide model.num_heads {self.num_heads}; set both together",
        )
        _require(
            self.head_dim % 2 == 0,
            "model.head_dim",
            f"rotary embedding needs an even size, got {self.head_dim}",
        )
        _require(
            self.rope_scaling == "none" or self.rope_low_frequency_factor < self.rope_high_frequency_factor,
            "model.rope_low_frequency_factor",
            f"must be below model.rope_high_frequency_factor {self.rope_high_frequency_factor}",
        )


@dataclass(frozen=True)
class DataConfig:
    """What the run reads. Data sets are folders written by `python -m orthros_jax prepare`."""

    paths: list[str] = field(default_factory=list)
    """Prepared data set folders."""
    weights: list[float] = field(default_factory=list)
    """Sampling weight of each path; empty mixes in proportion to size."""
    sequence_length: int = 2048
    """Rows T of a training sequence; a window holds T + 1 tokens and consecutive windows share one."""
    source: str | None = None
    """What to prepare if the only path does not exist yet: `python-stdlib`, a file, folder, glob or URL."""
    tokenizer: str = "byte"
    """Tokenizer for `source`: `byte`, a tokenizer.json file, or `train:SIZE` for a new BPE."""
    shuffle: bool = True
    """Visit the windows of each epoch in a random order that depends on training.seed alone."""
    prefetch: int = 16
    """Batches that the loader reads ahead."""

    def __post_init__(self):
        _require(self.sequence_length > 0, "data.sequence_length", f"must be positive, got {self.sequence_length}")
        _require(self.prefetch > 0, "data.prefetch", f"must be positive, got {self.prefetch}")
        _require(
            len(self.weights) in (0, len(self.paths)),
            "data.weights",
            f"{len(self.weights)} weights for {len(self.paths)} paths; give one for each path or none",
        )
        _require(all(w > 0 for w in self.weights), "data.weights", f"must all be positive, got {self.weights}")
        _require(
            self.source is None or len(self.paths) == 1,
            "data.source",
            f"needs exactly one entry in data.paths to write to, got {len(self.paths)}",
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101) and its schedule."""

    learning_rate: float = 4e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after the warm-up; wsd holds the peak and then decays linearly (arXiv 2404.06395)."""
    schedule_steps: int | None = None
    """Steps to the final rate, with warm-up; null is training.steps at the first start, kept with the run."""
    warmup_steps: int = 0
    """Steps of linear warm-up; the first has learning_rate / warmup_steps."""
    decay_steps: int = 0
    """Length of the final decay (schedule wsd)."""
    final_ratio: float = 0.1
    """Final learning rate as a share of the peak; it is held after schedule_steps."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms, scales and offsets are never decayed."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 leaves gradients as they are."""
    ema_decay: float = 0.0
    """Decay of an exponential moving average of the parameters, used in evaluation; 0 is off."""

    def __post_init__(self):
        _require(self.learning_rate > 0, "optimizer.learning_rate", f"must be positive, got {self.learning_rate}")
        _require(self.eps > 0, "optimizer.eps", f"must be positive, got {self.eps}")
        for name in ("beta1", "beta2", "ema_decay"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"optimizer.{name}", f"must be in [0, 1), got {value}")
        for name in ("warmup_steps", "decay_steps", "weight_decay", "clip_norm"):
            value = getattr(self, name)
            _require(value >= 0, f"optimizer.{name}", f"must not be negative, got {value}")
        _require(0 <= self.final_ratio <= 1, "optimizer.final_ratio", f"must be in [0, 1], got {self.final_ratio}")
        _require(
            self.schedule_steps is None or self.schedule_steps > 0,
            "optimizer.schedule_steps",
            f"must be positive or null, got {self.schedule_steps}",
        )
        _require(
            self.schedule != "wsd" or self.decay_steps > 0,
            "optimizer.decay_steps",
            "optimizer.schedule wsd needs a decay length, got 0",
        )


@dataclass(frozen=True)
class TrainingConfig:
    """Length, batch and safety of the run."""

    steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 128
    """Global batch in sequences, all devices and accumulation steps together."""
    accumulation: int = 1
    """Micro-batches that one step is cut into."""
    output_fraction: float = 1.0
    """Share of a sequence's rows that get an output row, drawn anew in each step; fewer are cheaper and learn less."""
    seed: int = 0
    """Seed of initialisation, data order and drawn output rows."""
    z_loss: float = 0.0
    """Weight of the squared log-normaliser added to the loss (PaLM, arXiv 2204.02311 section 5)."""
    max_skipped_steps: int = 10
    """Steps with a non-finite loss or gradient are skipped; this many in a row end the run."""
    watchdog_seconds: float = 600.0
    """Print where the run hangs when a step takes longer than this."""
    compile_cache: str | None = None
    """Folder of compiled programs, from which a later start takes them; null keeps none."""
    profile_steps: list[int] | None = None
    """First and last step to profile, for example [10, 12]; null profiles none."""

    def __post_init__(self):
        for name in ("steps", "batch_size", "accumulation", "max_skipped_steps", "watchdog_seconds"):
            value = getattr(self, name)
            _require(value > 0, f"training.{name}", f"must be positive, got {value}")
        _require(
            0 < self.output_fraction <= 1,
            "training.output_fraction",
            f"must be above 0 and at most 1, got {self.output_fraction}",
        )
        _require(self.seed >= 0, "training.seed", f"must not be negative, got {self.seed}")
        _require(self.z_loss >= 0, "training.z_loss", f"must not be negative, got {self.z_loss}")
        _require(
            self.batch_size % self.accumulation == 0,
            "training.accumulation",
            f"{self.accumulation} does not divide training.batch_size {self.batch_size}",
        )
        _require(self.compile_cache != "", "training.compile_cache", "must name a folder, or be null to keep none")
        if self.profile_steps is not None:
            _require(
                len(self.profile_steps) == 2 and 1 <= self.profile_steps[0] <= self.profile_steps[1],
                "training.profile_steps",
                f"must be the first and the last step to profile, counted from 1, got {self.profile_steps}; write "
                "[10, 12], or null for none",
            )
            _require(
                self.profile_steps[1] <= self.steps,
                "training.profile_steps",
                f"{self.profile_steps} goes beyond training.steps {self.steps}; profile earlier steps or make more",
            )


@dataclass(frozen=True)
class MeshConfig:
    """Device mesh. The product of the axes is the number of devices."""

    data: int = -1
    """Replicas that split the batch; -1 takes all devices that the other axes leave."""
    fsdp: int = 1
    """Shards of parameters and optimizer state; they split the batch as well."""
    tensor: int = 1
    """Shards of heads, feed-forward width and vocabulary."""
    context: int = 1
    """Parts that each sequence is cut into, for sequences that are too long for one device."""

    def __post_init__(self):
        _require(self.data > 0 or self.data == -1, "mesh.data", f"must be positive or -1, got {self.data}")
        for name in ("fsdp", "tensor", "context"):
            value = getattr(self, name)
            _require(value > 0, f"mesh.{name}", f"must be positive, got {value}")


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving. The last state is always saved."""

    every: int = 1000
    """Steps between saves."""
    keep_last: int = 2
    """Newest checkpoints to keep."""
    keep_every: int | None = None
    """Keep every step divisible by this for ever; null keeps none."""

    def __post_init__(self):
        for name in ("every", "keep_last"):
            value = getattr(self, name)
            _require(value > 0, f"checkpoint.{name}", f"must be positive, got {value}")
        _require(
            self.keep_every is None or self.keep_every > 0,
            "checkpoint.keep_every",
            f"must be positive or null, got {self.keep_every}",
        )


@dataclass(frozen=True)
class EvaluationConfig:
    """Loss on the held-out split: a token-weighted mean over all of it."""

    every: int = 1000
    """Steps between evaluations; one more follows the last step."""
    sample_prompt: str = ""
    """Text that a sample continues at the end of the run; empty is no sample."""
    sample_tokens: int = 200
    """Tokens of that sample."""

    def __post_init__(self):
        _require(self.every > 0, "evaluation.every", f"must be positive, got {self.every}")
        _require(self.sample_tokens > 0, "evaluation.sample_tokens", f"must be positive, got {self.sample_tokens}")


@dataclass(frozen=True)
class MetricsConfig:
    """What is reported, and where. metrics.jsonl in the run folder is always written."""

    every: int = 1
    """Steps between reports."""
    tensorboard: bool = True
    """Write TensorBoard event files to run_dir/tensorboard."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases mode."""
    wandb_project: str = "orthros"
    """Weights & Biases project."""
    progress: bool = True
    """Show a progress bar."""
    peak_tflops: float | None = None
    """Peak of one device in TFLOP/s, the base of MFU; null looks it up and leaves MFU out if unknown."""

    def __post_init__(self):
        _require(self.every > 0, "metrics.every", f"must be positive, got {self.every}")
        _require(
            self.peak_tflops is None or self.peak_tflops > 0,
            "metrics.peak_tflops",
            f"must be positive or null, got {self.peak_tflops}",
        )


@dataclass(frozen=True)
class Config:
    """A training run."""

    run_dir: str = "runs/{model.kind}"
    """Folder of checkpoints and metrics; a setting's name in braces stands for its value."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

    def __post_init__(self):
        _require(bool(self.run_dir), "run_dir", "must name a folder")
        _require(
            self.data.sequence_length <= self.model.max_sequence_length,
            "data.sequence_length",
            f"{self.data.sequence_length} is longer than model.max_sequence_length "
            f"{self.model.max_sequence_length}; shorten the sequences or raise the limit",
        )
        if self.optimizer.schedule_steps is not None:
            phases = self.optimizer.warmup_steps + self.optimizer.decay_steps
            _require(
                phases <= self.optimizer.schedule_steps,
                "optimizer.schedule_steps",
                f"{self.optimizer.schedule_steps} is shorter than warm-up plus decay, {phases} steps",
            )


def to_dict(config) -> dict:
    """The settings as nested dictionaries of plain values, the form in which they are saved."""
    return dataclasses.asdict(config)
