"""The schema: one tree of frozen models. The docstring under a field is what `config explain` prints.

Every model refuses unknown keys, takes no `true` for a number and no text for one, and no number that is not finite.
Where a section has kinds (`name: gpt`, `name: sgd`), each kind is a model of its own, so that a setting which
the chosen kind would not read is refused instead of ignored.

Paths are relative to the folder in which the command runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Tag, model_validator
from pydantic_core import PydanticCustomError

from fourfold.config.values import (
    Address,
    Betas,
    Count,
    Files,
    FolderName,
    Fraction,
    Half,
    Ids,
    Location,
    Merges,
    Norm,
    NotNegative,
    Positive,
    Seed,
    Settings,
    Several,
    Share,
    Text,
    Whole,
)


class Section(BaseModel):
    """What all sections share: frozen, strict, no unknown keys, finite numbers only."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
        protected_namespaces=(),
    )


def relation(key: str, expected: str, found: object, remedy: str) -> PydanticCustomError:
    """An error about two settings that do not go together, reported at `key` (relative to the model that raises it)."""
    context = {"key": key, "expected": expected, "found": str(found), "remedy": remedy}
    return PydanticCustomError("relation", "expected {expected}, found {found}; {remedy}", context)


def kind(default: str) -> Discriminator:
    """Choose a section's model by its `name`; without one, `default`."""

    def choose(value: Any) -> str:
        name = value.get("name", default) if isinstance(value, Mapping) else getattr(value, "name", default)
        return str(name)

    return Discriminator(choose)


class Gpt(Section):
    """Fourfold's own decoder-only transformer, from random weights."""

    name: Literal["gpt"] = "gpt"
    """Which model: gpt (ours) or hf_causal_lm (a causal language model of transformers)."""
    layers: Count = 4
    """Transformer blocks."""
    width: Count = 192
    """Features of the residual stream; a multiple of heads."""
    heads: Count = 6
    """Attention heads."""
    context: Count = 128
    """Longest sequence, in tokens (the size of the position table)."""
    dropout: Share = 0.0
    """Probability that an element is dropped, at every dropout site."""
    tie_embeddings: bool = True
    """Use the token embedding as the output layer too."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Gpt:
        if self.width % self.heads:
            below, above = self.width - self.width % self.heads, self.width + -self.width % self.heads
            fits = " or ".join(str(size) for size in (below, above) if size)
            expected = f"a multiple of model.heads ({self.heads})"
            raise relation("width", expected, self.width, f"try {fits}")
        return self


class HfCausalLm(Section):
    """A causal language model of Hugging Face transformers: from a local folder, or random weights from a config."""

    name: Literal["hf_causal_lm"] = "hf_causal_lm"
    """Which model: gpt (ours) or hf_causal_lm (a causal language model of transformers)."""
    path: Location | None = None
    """Folder with config.json and, for trained weights, *.safetensors and tokenizer.json. Nothing is downloaded."""
    config: Settings | None = None
    """Instead of a path: what config.json would hold, `model_type` included; the weights are random."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention code of transformers."""

    @model_validator(mode="after")
    def _one_source(self) -> HfCausalLm:
        if self.path is None and self.config is None:
            raise relation("path", "a folder in model.path, or a mapping in model.config", "neither", "set one of them")
        if self.path is not None and self.config is not None:
            raise relation("config", "either model.path or model.config", "both", "remove one of them")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            remedy = "say for instance model_type: llama"
            raise relation("config.model_type", "the name of an architecture", self.config.get("model_type"), remedy)
        return self


class Rows(Section):
    """What all data share."""

    sequence: Count = 128
    """Tokens a row."""
    held_out: Half = 0.05
    """Share of the tokens that is kept for evaluation and never trained on."""


class Corpus(Rows):
    """Text, which a byte-level BPE trained on it turns into tokens."""

    vocabulary: Merges = 2048
    """Size of the byte-level BPE that is trained on the text (at least the 256 bytes and an end-of-text mark)."""
    cache: Location | None = None
    """Folder for the tokenizer and the token ids; null: fourfold's folder in the user's cache directory."""
    limit_bytes: Count | None = None
    """Use at most this many bytes of the text; null: all of it."""


class Stdlib(Corpus):
    """The source text of the running Python's standard library: always there, about 10 MB."""

    name: Literal["stdlib"] = "stdlib"
    """Where the text comes from: stdlib, text (your files) or tokens (your files of token ids)."""


class TextFiles(Corpus):
    """Your own text files (UTF-8)."""

    name: Literal["text"] = "text"
    """Where the text comes from: stdlib, text (your files) or tokens (your files of token ids)."""
    files: Files
    """Paths or patterns such as notes/**/*.txt, relative to the folder in which the command runs."""


class TokenFiles(Rows):
    """Files of token ids, one-dimensional integer arrays in .npy format."""

    name: Literal["tokens"] = "tokens"
    """Where the text comes from: stdlib, text (your files) or tokens (your files of token ids)."""
    files: Files
    """Paths or patterns of .npy files, relative to the folder in which the command runs."""
    vocabulary: Ids = 2048
    """How many token ids there are: every id in the files is smaller."""


class CrossEntropy(Section):
    """Cross-entropy of the next token, summed over tokens and divided once by how many there were."""

    name: Literal["cross_entropy"] = "cross_entropy"
    """What is minimised: cross_entropy of the next token, or goldfish (the same, of all but one in k tokens)."""


class Goldfish(Section):
    """Cross-entropy of all but one in k tokens, always the same ones: against learning passages by heart."""

    name: Literal["goldfish"] = "goldfish"
    """What is minimised: cross_entropy of the next token, or goldfish (the same, of all but one in k tokens)."""
    k: Several = 4
    """One in k tokens is never learnt."""
    context: Count = 13
    """How many tokens before a token decide whether it is learnt (not read by mask: static)."""
    mask: Literal["hashed", "static"] = "hashed"
    """hashed: by the tokens before it, so the same ones wherever a passage comes again; static: every k-th of a row."""


class Descent(Section):
    """What every optimizer shares: the learning rate over the steps, weight decay, clipping."""

    lr: Positive = 1e-3
    """Peak learning rate."""
    weight_decay: NotNegative = 0.1
    """Decay of matrices and embeddings (vectors, such as biases and norms, are never decayed)."""
    clip: Positive | None = 1.0
    """Largest norm of the whole gradient; null: no clipping."""
    clip_norm: Norm = 2
    """Which norm `clip` bounds: 2 or inf."""
    warmup: Whole = 0
    """Steps over which the learning rate rises linearly to lr."""
    decay: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate falls after the warm-up, until the last step."""
    final: Fraction = 0.1
    """Learning rate at the last step, as a share of lr (not read by decay: constant)."""


class AdamW(Descent):
    """Adam with decoupled weight decay."""

    name: Literal["adamw"] = "adamw"
    """Which optimizer: adamw or sgd."""
    betas: Betas = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square."""
    eps: Positive = 1e-8
    """Added to the root of the second mean."""


class Sgd(Descent):
    """Stochastic gradient descent."""

    name: Literal["sgd"] = "sgd"
    """Which optimizer: adamw or sgd."""
    momentum: Share = 0.0
    """Share of the last update that is kept."""


class Sample(Section):
    """Text that the model writes when training has ended."""

    prompt: Text = "def "
    """How the text begins."""
    tokens: Count = 64
    """How many tokens to write."""
    temperature: NotNegative = 0.8
    """0: always the most likely token; 1: as the model says."""


class Train(Section):
    """How long, and how much at a time."""

    steps: Count = 100
    """Optimizer steps in all (a resumed run counts from 0 too)."""
    batch: Count = 8
    """Rows of the global batch: of one optimizer step, over all workers and micro-batches."""
    evaluate_every: Whole = 0
    """Steps between evaluations on the held-out text; 0: at the end only."""
    evaluate_batches: Count = 8
    """Global batches of one evaluation."""
    sample: Sample | None = None
    """Text to write at the end; null: none."""


class RunFolder(Section):
    """Where a run writes, and how often."""

    folder: Location = "runs"
    """Folder of all runs."""
    name: FolderName | None = None
    """The run's own folder inside it; null: date and time. Letters, digits and _ . + - only."""
    resume: bool = False
    """Go on from the newest whole checkpoint of this run."""
    checkpoint_every: Whole = 0
    """Steps between checkpoints; 0: at the end, and when asked to stop by a signal."""
    keep: Count = 3
    """How many of the newest checkpoints stay."""
    log_every: Count = 1
    """Steps between lines of metrics."""
    tensorboard: Literal["auto"] | bool = "auto"
    """Write TensorBoard files: true, false, or auto (when it is installed)."""


class Launch(Section):
    """Which processes run the plan."""

    workers: Count | None = None
    """Worker processes on this machine; null: what the plan needs (plan: auto: one a physical core, at most 2)."""
    backend: Literal["auto", "gloo", "nccl", "threads"] = "auto"
    """What carries the messages; auto: nccl where every worker has a GPU, otherwise gloo. threads: one process."""
    threads: Count = 1
    """CPU threads of a worker's computation."""
    max_restarts: Whole = 0
    """How often the group is started again, from the newest checkpoint, when a worker dies."""
    stall_after: Positive = 300.0
    """Seconds without progress of a worker after which the run is ended and the worker named."""
    address: Address | None = None
    """host:port where the workers meet; null: a free port of this machine, on loopback."""


Model = Annotated[Annotated[Gpt, Tag("gpt")] | Annotated[HfCausalLm, Tag("hf_causal_lm")], kind("gpt")]
Data = Annotated[
    Annotated[Stdlib, Tag("stdlib")] | Annotated[TextFiles, Tag("text")] | Annotated[TokenFiles, Tag("tokens")],
    kind("stdlib"),
]
Loss = Annotated[
    Annotated[CrossEntropy, Tag("cross_entropy")] | Annotated[Goldfish, Tag("goldfish")], kind("cross_entropy")
]
Optimizer = Annotated[Annotated[AdamW, Tag("adamw")] | Annotated[Sgd, Tag("sgd")], kind("adamw")]


class Config(Section):
    """One run: everything that a person chooses."""

    seed: Seed = 1
    """Where every random number comes from: weights, dropout, order of the data."""
    model: Model = Gpt()
    """What is trained."""
    data: Data = Stdlib()
    """What it is trained on."""
    loss: Loss = CrossEntropy()
    """What is minimised."""
    optimizer: Optimizer = AdamW()
    """How the weights move."""
    train: Train = Train()
    """How long, and how much at a time."""
    plan: Literal["auto"] | Settings = "auto"
    """How the run is spread: auto (the planner chooses), or a mapping of placement, schedule, wire and sync."""
    run: RunFolder = RunFolder()
    """Where the run writes, and how often."""
    launch: Launch = Launch()
    """Which processes run the plan."""
    hardware: Text = "here"
    """What to plan for: here (this machine), a catalogue name such as 8x rtx4090, or the path of a cluster file."""

    @model_validator(mode="after")
    def _settings_agree(self) -> Config:
        if isinstance(self.model, Gpt) and self.data.sequence > self.model.context:
            remedy = f"set model.context={self.data.sequence}, or shorten data.sequence"
            raise relation("data.sequence", f"at most model.context ({self.model.context})", self.data.sequence, remedy)
        if self.train.evaluate_every and self.data.held_out == 0:
            remedy = "set data.held_out=0.05, or train.evaluate_every=0"
            raise relation("data.held_out", "a share above 0, since train.evaluate_every asks for it", 0, remedy)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain mappings, lists, text, numbers, booleans and None; `Config.model_validate` reads it back equal."""
        return {
            key: {"name": value["name"], **value} if isinstance(value, dict) and "name" in value else value
            for key, value in self.model_dump(mode="json").items()
        }
