"""Closed forms: the time of one decode step, one update and one weight sync, and the memory they need.

    decode step   max(bytes of weights and KV cache / bandwidth, FLOPs / compute speed) + launch overhead + host time
    forward pass  FLOPs / compute speed + bytes moved by elementwise operations / bandwidth
    update        forward, backward (two forward passes), further forward passes if the settings need them; then AdamW
    sync          16-bit weights once over the slowest link

The constants were fitted to this package on one H200 (docs/scaling.md); all other numbers follow from the model's shape
and the hardware. Not covered: pipeline and context parallelism, quantized weights, offloading.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from arpo.config.schema import Config
from arpo.plan.hardware import Hardware
from arpo.plan.shape import Shape

ELEMENTWISE_BYTES = 260.0  # moved in a forward pass beside the matmuls, per layer, hidden unit and token, in 16 bits
ACTIVATION_HIDDEN, ACTIVATION_INTERMEDIATE = 23.0, 8.0  # bytes kept for the backward pass, per layer and token
LOGITS_AT_ONCE, LOGITS_MEMORY = 2048, 1 << 29  # the most tokens and float32 bytes of logits that exist at a time
LOGITS_BYTES = 8.0  # per logit: 16 bits, its gradient and the log-softmax
PREFILL_CHUNK = 16384  # prompt tokens computed in one step
ADAM_BYTES = 32.0  # read and written by an AdamW step, per trained parameter
STATE_BYTES = 16.0  # float32 master weight, gradient and two moments, per trained parameter
SHARING_PAYS = 0.95  # unique / total tokens; above it the trainer treats every trajectory as its own tree
USABLE_MEMORY = 0.92  # of a GPU; the rest is for the runtime and fragmentation


@dataclass(frozen=True, slots=True)
class Decoder:
    """Times of one sampling replica of the model on `tensor_parallel` GPUs. All results are in seconds."""

    shape: Shape
    hardware: Hardware
    number_bytes: int = 2
    tensor_parallel: int = 1

    @property
    def weights(self) -> float:
        """Reading all weights once."""
        return self.shape.matmul_parameters * self.number_bytes / self.tensor_parallel / self.hardware.memory_speed

    @property
    def kv_per_token(self) -> float:
        """Reading the keys and values of one token."""
        return self.shape.kv_size_per_gpu(self.tensor_parallel) * self.number_bytes / self.hardware.memory_speed

    def compute(self, tokens: float, context: float) -> float:
        """The matmuls and attention of these tokens, which attend to `context` tokens in all."""
        shape = self.shape
        flops = 2 * shape.matmul_parameters * tokens + 4 * shape.layers * shape.heads * shape.head_dim * context
        return flops / self.tensor_parallel / self.hardware.compute_speed(self.number_bytes)

    def elementwise(self, tokens: float) -> float:
        """Norms, rotary embeddings and residual sums of these tokens."""
        moved = ELEMENTWISE_BYTES * self.shape.layers * self.shape.hidden * self.number_bytes / 2
        return tokens * moved / self.tensor_parallel / self.hardware.memory_speed

    def overhead(self, rows: int) -> float:
        """A decode step of this many rows without reading weights and KV cache and without compute."""
        hardware, layers = self.hardware, self.shape.layers
        fixed = layers * hardware.decode_layer + hardware.step_host
        return fixed + rows * hardware.token_host + self.elementwise(rows) + self._all_reduce(rows)

    def _all_reduce(self, tokens: float) -> float:
        """Two all-reduces over the GPUs of the replica in every layer."""
        if self.tensor_parallel == 1:
            return 0.0
        sent = 4 * tokens * self.shape.hidden * self.number_bytes * (self.tensor_parallel - 1) / self.tensor_parallel
        return self.shape.layers * (self.hardware.layer_sync + sent / self.hardware.link_speed(self.tensor_parallel))

    def decode(self, rows: int, context: int, steps: int = 1) -> float:
        """`steps` decode steps, each giving every row a token; the rows hold `context` tokens at first."""
        reading = _sum_of_larger(
            (self.weights + context * self.kv_per_token, rows * self.kv_per_token),
            (self.compute(rows, context), self.compute(0, rows)),
            steps,
        )
        return steps * self.overhead(rows) + reading

    def prefill(self, rows: int, context: int, new_tokens: int) -> float:
        """A step that computes `new_tokens` prompt or result tokens for some of the rows and gives every row a token.

        Each new token is assumed to attend to half of a row's average context. Without new tokens it is a decode step.
        """
        if not new_tokens:
            return self.decode(rows, context)
        tokens = rows + new_tokens
        mean = context / rows
        work = max(self.weights + context * self.kv_per_token, self.compute(tokens, context + new_tokens * mean / 2))
        chunks = math.ceil(new_tokens / PREFILL_CHUNK)
        launch = max(self.hardware.eager_layer, self.hardware.decode_layer) * self.shape.layers * chunks
        gpu = work + self.elementwise(tokens)
        return max(gpu, launch) + self.hardware.step_host + rows * self.hardware.token_host + self._all_reduce(tokens)


def _sum_of_larger(a: tuple[float, float], b: tuple[float, float], count: int) -> float:
    """Sum over i < count of max(a0 + a1 i, b0 + b1 i)."""
    (a0, a1), (b0, b1) = a, b
    if a1 == b1 or count == 1:
        return _series(*(a if a0 >= b0 else b), 0, count)
    cross = (b0 - a0) / (a1 - b1)
    turn = math.ceil(min(max(cross, 0.0), count))
    low, high = (a, b) if a1 < b1 else (b, a)  # the steeper one is larger from the crossing on
    return _series(*low, 0, turn) + _series(*high, turn, count)


def _series(start: float, slope: float, first: int, end: int) -> float:
    """Sum over first <= i < end of start + slope i."""
    count = end - first
    return count * start + slope * count * (first + end - 1) / 2


@dataclass(frozen=True, slots=True)
class UpdateTime:
    """The seconds of one update on all training GPUs together, by what they are spent on."""

    compute: float
    elementwise: float
    launch: float  # by which launching kernels takes longer than running them
    network: float  # by which gathering sharded weights takes longer than computing
    optimizer: float

    @property
    def seconds(self) -> float:
        """The whole update."""
        return self.compute + self.elementwise + self.launch + self.network + self.optimizer


def trained_parameters(shape: Shape, config: Config) -> int:
    """The number of trained parameters: all, or those of the LoRA adapter."""
    return shape.adapter_parameters(config.train.lora_rank) if config.train.lora_rank else shape.parameters


def forward_passes(config: Config) -> float:
    """The cost of an update in forward passes; a backward pass counts as two, or as one with LoRA."""
    train = config.train
    backward = 1 if train.lora_rank else 2
    once = (train.minibatches * train.epochs > 1) + (config.loss.kl_coef > 0)  # old and reference log-probs
    return train.epochs * (1 + backward + train.gradient_checkpointing) + once


def largest_share(config: Config, gpus: int, trees: float) -> float:
    """The fraction of a step's tokens on the GPU with the most trees: each minibatch is dealt out, no tree is split.

    `trees` are the trees of a step with a learning signal, assumed to be equally large.
    """
    per_minibatch = max(1, round(trees / config.train.minibatches))
    return math.ceil(per_minibatch / gpus) / per_minibatch


def update_time(
    config: Config, shape: Shape, hardware: Hardware, gpus: int, tokens: float, context: float, trees: float
) -> UpdateTime:
    """One update on `tokens` unique tokens of `trees` trees, with weights sharded over all GPUs.

    A token attends to `context` others on average.
    """
    train, number_bytes, passes = config.train, number_size(config), forward_passes(config)
    share = tokens * largest_share(config, gpus, trees)
    compute = passes * share * shape.forward_flops(context) / hardware.compute_speed(number_bytes)
    elementwise = passes * Decoder(shape, hardware, number_bytes).elementwise(share)
    batches = train.minibatches * math.ceil(share / train.minibatches / train.max_microbatch_tokens) if tokens else 0
    launch = batches * passes * shape.layers * hardware.eager_layer
    gather = 0.0 if gpus == 1 else batches * passes * shape.parameters * number_bytes / hardware.link_speed(gpus)
    steps = train.epochs * train.minibatches
    optimizer = steps * ADAM_BYTES * trained_parameters(shape, config) / gpus / hardware.memory_speed
    return UpdateTime(
        compute,
        elementwise,
        launch=max(0.0, launch - compute - elementwise),
        network=max(0.0, gather - max(compute + elementwise, launch)),
        optimizer=optimizer if tokens else 0.0,
    )


def number_size(config: Config) -> int:
    """Bytes per number in the model's dtype."""
    return 2 if config.model.dtype == "bfloat16" else 4


def sync_time(config: Config, shape: Shape, hardware: Hardware, gpus: int) -> float:
    """Seconds until all sampling GPUs have the new weights; 0 on a single GPU, which shares them.

    Of an adapter only the adapter is sent; the receivers merge it.
    """
    if gpus == 1:
        return 0.0
    return trained_parameters(shape, config) * number_size(config) / hardware.link_speed(gpus)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on each GPU, by what they hold."""

    weights: float = 0.0
    optimizer: float = 0.0  # float32 master weights (unless the weights are float32), gradients and moments
    activations: float = 0.0
    logits: float = 0.0
    kv_cache: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.optimizer + self.activations + self.logits + self.kv_cache


def training_memory(config: Config, shape: Shape, gpus: int) -> Memory:
    """Memory on each training GPU, with weights, gradients and optimizer states sharded over all of them."""
    size, train = number_size(config), config.train
    layer = (ACTIVATION_HIDDEN * shape.hidden + ACTIVATION_INTERMEDIATE * shape.intermediate) * size / 2
    kept = layer + shape.layers * shape.hidden * size if train.gradient_checkpointing else shape.layers * layer
    states = STATE_BYTES if size == 2 else STATE_BYTES - 4  # float32 weights are their own masters
    gathered = shape.layer_parameters * size if gpus > 1 else 0  # one layer at a time is gathered from its shards
    logits = min(LOGITS_AT_ONCE, LOGITS_MEMORY // (4 * shape.vocab), train.max_microbatch_tokens)
    return Memory(
        weights=shape.parameters * size / gpus + gathered,
        optimizer=states * trained_parameters(shape, config) / gpus,
        activations=train.max_microbatch_tokens * kept,
        logits=logits * shape.vocab * LOGITS_BYTES * size / 2,
    )
