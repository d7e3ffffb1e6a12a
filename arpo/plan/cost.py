"""Closed forms: what one decode step, one update and one weight sync take, and what memory they need.

    decode step   max(weights and keys read / speed of memory, FLOPs / speed of arithmetic) + launching + host
    forward pass  FLOPs / speed of arithmetic + what norms, rotations and sums read and write / speed of memory
    update        forward, twice that backward, more forward passes where the settings ask for them; then AdamW
    sync          16-bit weights once over the slowest link on the way

Constants were fitted to this package on one H200 (docs/scaling.md); every other number comes from the shape of the
model and the hardware. Does not cover: pipeline parallelism, long-context parallelism, quantised weights, offloading.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from arpo.config.schema import Config
from arpo.plan.hardware import Hardware
from arpo.plan.shape import Shape

TRAFFIC = 260.0  # bytes of 16-bit numbers, per layer, width and token, that a forward pass moves beside its matrices
KEPT_WIDTH, KEPT_INNER = 23.0, 8.0  # bytes of activations kept for the backward pass, per layer and token
LOGITS_AT_ONCE = 2048  # tokens whose logits exist at a time
LOGITS_BYTES = 8.0  # per logit: 16 bits, and what its gradient and the log-softmax take
CHUNK = 16384  # prompt tokens read in a step
ADAM_BYTES = 32.0  # per trained weight: what an AdamW step reads and writes
STATE_BYTES = 16.0  # per trained weight: float32 master, gradient and two moments
SHARING_PAYS = 0.95  # unique over total tokens; above, the trainer takes every path as a tree of its own
USABLE = 0.92  # of a GPU's memory; the rest is for the runtime and fragmentation


@dataclass(frozen=True, slots=True)
class Decoder:
    """Times of one replica of the model that samples, on `ways` GPUs that share its weights."""

    shape: Shape
    hardware: Hardware
    number_bytes: int = 2
    ways: int = 1

    @property
    def weight_seconds(self) -> float:
        """To read all weights once."""
        return self.shape.matrix_weights * self.number_bytes / self.ways / self.hardware.reading

    @property
    def kv_seconds(self) -> float:
        """To read the keys and values of one token."""
        return self.shape.kv_on_each(self.ways) * self.number_bytes / self.hardware.reading

    def arithmetic(self, tokens: float, seen: float) -> float:
        """To compute so many tokens that see `seen` tokens in all."""
        shape = self.shape
        flops = 2 * shape.matrix_weights * tokens + 4 * shape.layers * shape.heads * shape.head * seen
        return flops / self.ways / self.hardware.arithmetic(self.number_bytes)

    def small(self, tokens: float) -> float:
        """What norms, rotations and sums of so many tokens take."""
        moved = TRAFFIC * self.shape.layers * self.shape.width * self.number_bytes / 2
        return tokens * moved / self.ways / self.hardware.reading

    def overhead(self, rows: int) -> float:
        """What a decode step of so many rows takes beside reading weights and keys, and arithmetic."""
        hardware, layers = self.hardware, self.shape.layers
        fixed = layers * hardware.decode_layer + hardware.step_host
        return fixed + rows * hardware.token_host + self.small(rows) + self._joining(rows)

    def _joining(self, tokens: float) -> float:
        """Two sums over the GPUs of the replica in every layer."""
        if self.ways == 1:
            return 0.0
        sent = 4 * tokens * self.shape.width * self.number_bytes * (self.ways - 1) / self.ways
        return self.shape.layers * (self.hardware.layer_sync + sent / self.hardware.sending(self.ways))

    def decode(self, rows: int, seen: int, steps: int = 1) -> float:
        """So many steps, each giving every row a token; `seen` tokens are kept of these rows at first."""
        reading = _sum_of_larger(
            (self.weight_seconds + seen * self.kv_seconds, rows * self.kv_seconds),
            (self.arithmetic(rows, seen), self.arithmetic(0, rows)),
            steps,
        )
        return steps * self.overhead(rows) + reading

    def mixed(self, rows: int, seen: int, unread: int) -> float:
        """A step that reads `unread` prompt tokens for some of the rows, and gives every row a token.

        A row's own token and the prompt tokens are both computed; what prompt tokens see is taken as `seen` on average
        per row. Forks have nothing to read: they join the next decode step.
        """
        if not unread:
            return self.decode(rows, seen)
        tokens = rows + unread
        mean = seen / rows
        work = max(self.weight_seconds + seen * self.kv_seconds, self.arithmetic(tokens, seen + unread * mean / 2))
        steps = math.ceil(unread / CHUNK)
        launch = max(self.hardware.eager_layer, self.hardware.decode_layer) * self.shape.layers * steps
        gpu = work + self.small(tokens)
        return max(gpu, launch) + self.hardware.step_host + rows * self.hardware.token_host + self._joining(tokens)


def _sum_of_larger(a: tuple[float, float], b: tuple[float, float], count: int) -> float:
    """Sum over i < count of max(a0 + a1 i, b0 + b1 i)."""
    (a0, a1), (b0, b1) = a, b
    if a1 == b1 or count == 1:
        return _series(*(a if a0 >= b0 else b), 0, count)
    cross = (b0 - a0) / (a1 - b1)
    turn = min(max(math.ceil(cross), 0), count)
    low, high = (a, b) if a1 < b1 else (b, a)  # the steeper one is larger from the crossing on
    return _series(*low, 0, turn) + _series(*high, turn, count)


def _series(start: float, slope: float, first: int, end: int) -> float:
    """Sum over first <= i < end of start + slope i."""
    count = end - first
    return count * start + slope * count * (first + end - 1) / 2


@dataclass(frozen=True, slots=True)
class Update:
    """What one update takes, in seconds, on all training GPUs together."""

    arithmetic: float
    memory: float  # norms, rotations and sums
    launching: float  # by which launching is slower than what is launched
    network: float  # by which collecting weights is slower than computing
    optimizer: float

    @property
    def seconds(self) -> float:
        """Of the whole update."""
        return self.arithmetic + self.memory + self.launching + self.network + self.optimizer


def trained_weights(shape: Shape, config: Config) -> int:
    """How many weights are trained: all, or those of the adapter."""
    return shape.adapter(config.train.lora_rank) if config.train.lora_rank else shape.parameters


def forward_passes(config: Config) -> float:
    """How many forward passes an update costs per token; a backward pass counts for two, or one with an adapter."""
    backward = 1 if config.train.lora_rank else 2
    return (
        1 + backward + config.train.gradient_checkpointing + (config.train.minibatches > 1) + (config.loss.kl_coef > 0)
    )


def busiest(config: Config, gpus: int, trees: float) -> float:
    """The share of a step's tokens on the GPU with most trees: they are dealt out in each minibatch, none is divided.

    `trees` are those of a step that teach something, taken as equally large.
    """
    dealt = max(1, round(trees / config.train.minibatches))
    return math.ceil(dealt / gpus) / dealt


def update(
    config: Config, shape: Shape, hardware: Hardware, gpus: int, tokens: float, context: float, trees: float
) -> Update:
    """One update on `tokens` unique tokens of so many trees, which see `context` others on average.

    Weights are sharded over all GPUs.
    """
    train, number_bytes, passes = config.train, number_size(config), forward_passes(config)
    share = tokens * busiest(config, gpus, trees)
    arithmetic = passes * share * shape.forward_flops(context) / hardware.arithmetic(number_bytes)
    decoder = Decoder(shape, hardware, number_bytes)
    memory = passes * decoder.small(share)
    groups = train.minibatches * math.ceil(share / train.minibatches / train.max_microbatch_tokens) if tokens else 0
    launching = groups * passes * shape.layers * hardware.eager_layer
    computing = max(arithmetic + memory, launching)
    sent = 0.0 if gpus == 1 else groups * passes * shape.parameters * number_bytes / hardware.sending(gpus)
    optimizer = train.minibatches * ADAM_BYTES * trained_weights(shape, config) / gpus / hardware.reading
    waiting = max(0.0, launching - arithmetic - memory), max(0.0, sent - computing)
    return Update(arithmetic, memory, *waiting, optimizer if tokens else 0.0)


def number_size(config: Config) -> int:
    """Bytes of a number in the format that the model computes in."""
    return 2 if config.model.dtype == "bfloat16" else 4


def sync(config: Config, shape: Shape, hardware: Hardware, gpus: int) -> float:
    """Seconds until all GPUs that sample have the new weights; on a single GPU they are shared and nothing moves.

    An adapter is merged where it arrives, so only itself is sent.
    """
    if gpus == 1:
        return 0.0
    return trained_weights(shape, config) * number_size(config) / hardware.sending(gpus)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on each GPU, by what they hold."""

    weights: float = 0.0
    optimizer: float = 0.0  # masters, gradients and moments, or gradients and moments where weights are their masters
    activations: float = 0.0
    logits: float = 0.0
    keys: float = 0.0  # keys and values of as many tokens as the plan has room for

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.optimizer + self.activations + self.logits + self.keys


def training_memory(config: Config, shape: Shape, gpus: int) -> Memory:
    """On each of so many training GPUs, with weights, gradients and optimizer sharded over them."""
    size, train = number_size(config), config.train
    layer = (KEPT_WIDTH * shape.width + KEPT_INNER * shape.inner) * size / 2
    kept = layer + shape.layers * shape.width * size if train.gradient_checkpointing else shape.layers * layer
    states = STATE_BYTES if size == 2 else STATE_BYTES - 4  # float32 weights are their own masters
    whole = shape.layer_weights * size if gpus > 1 else 0  # one layer at a time is collected from its shards
    return Memory(
        weights=shape.parameters * size / gpus + whole,
        optimizer=states * trained_weights(shape, config) / gpus,
        activations=train.max_microbatch_tokens * kept,
        logits=min(LOGITS_AT_ONCE, train.max_microbatch_tokens) * shape.vocabulary * LOGITS_BYTES * size / 2,
    )
