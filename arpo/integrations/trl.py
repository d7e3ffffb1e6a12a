"""ARPO in TRL: a GRPOTrainer whose completions are rollout trees, with an advantage for each turn.

    from arpo.integrations.trl import TreeGRPOTrainer

    trainer = TreeGRPOTrainer(
        model, reward_funcs=..., train_dataset=..., tools=[...], branching="arpo", args=GRPOConfig(...)
    )

For every prompt, the `num_generations` completions are the trajectories of one tree. They are sampled by arpo's local
engine from the model that is trained, weights and all, and the preset `branching` says where the tree branches and what
a turn gets for the rewards below it. All else is TRL's: prompts, chat templates, tools, reward functions, the loss.

Guarantees: tokens are never tokenized again. Tool results are masked. A tree is sampled by one process. Prompts,
completions and arguments of reward functions look as they do in a GRPOTrainer. With `branching="never"` it is one.
Evaluation never branches. The gradient is that of `arpo.Trainer` for the same trees and the same loss.
Not covered: vLLM, models on several devices (FSDP, DeepSpeed ZeRO), images, environments. Shared tokens are sampled
once, but TRL's loss computes them once per trajectory; `arpo.Trainer` trains them once.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from arpo.agent.agent import Agent, PromptEncoder
from arpo.agent.formats import CallFormat, build_format
from arpo.agent.turn_end import turn_end_tokens
from arpo.algorithm.advantage import compute_credits
from arpo.algorithm.batch import entropy_weights
from arpo.algorithm.branching import REWARD_POLICIES
from arpo.algorithm.rollout import sample_trees
from arpo.config.schema import Config
from arpo.config.section import MAX_SECONDS
from arpo.engine.local.engine import LocalEngine, default_kv_cache_tokens
from arpo.engine.local.kv_cache import BLOCK_SIZE
from arpo.errors import ArpoError
from arpo.integrations.presets import SCALES, Preset, load_preset, loss_arguments
from arpo.integrations.rows import Row, row_nodes, tree_row
from arpo.models.network import check_supported
from arpo.runs.json_values import shorten_columns
from arpo.runs.trees import MAX_COLUMN_CHARS
from arpo.tools.base import Tool, ToolError, ToolTimeout, ToolUnavailable
from arpo.tools.executor import Toolset
from arpo.tools.schema import build_spec
from arpo.types import Kind, Reward, RolloutTree, ScoredTree, Task, derive_seed

try:
    from accelerate.utils import gather_object, is_peft_model
    from trl import GRPOTrainer
    from trl.chat_template_utils import parse_response
    from trl.data_utils import is_conversational
except ImportError as error:
    raise ImportError(f"arpo.integrations.trl needs TRL: pip install 'trl>=1.16,<1.17' ({error})") from error

__all__ = ["TreeGRPOTrainer", "loss_arguments"]
PER_TOKEN_LOSSES = ("dapo", "cispo", "vespo", "bnpo")  # of TRL: these divide by a number of tokens, the others by rows
MAX_CALLS = 10_000  # of a trajectory, where TRL has no limit
NO_CUT = 1 << 40  # characters or tokens: results are not cut, as in TRL
_logger = logging.getLogger("arpo")


@dataclass(frozen=True, slots=True)
class _Place:
    """A row of the batch: a leaf of a tree, or None where the tree has fewer leaves than there are rows."""

    tree: int
    leaf: int | None


@dataclass(frozen=True, slots=True)
class _GivenPrompts(PromptEncoder):
    """The encoder of prompts that TRL has tokenized: their ids are in `task.meta`."""

    def encode(self, task: Task) -> tuple[int, ...]:
        """The token ids of the task's prompt."""
        return tuple(task.meta["prompt_ids"])


class TreeGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer with rollout trees. `trees` holds those of the last batch, scored and with their credits."""

    def __init__(self, *arguments: Any, branching: Preset = "arpo", **named: Any) -> None:
        """Take all arguments of GRPOTrainer, and `branching`.

        Args:
            branching: where trees branch and what a turn earns: the name of a preset ("arpo", "tree-grpo", ...), a TOML
                file of settings or an `arpo.Config`. "grpo" samples without branching; "never" leaves everything to TRL
        """
        self.trees: list[ScoredTree] = []
        self._config: Config | None = None
        if branching == "never":
            super().__init__(*arguments, **named)
            return
        given = inspect.signature(GRPOTrainer.__init__).bind(self, *arguments, **named).arguments
        _refuse_unsupported(given)
        super().__init__(*arguments, **named)
        self._refuse_unsupported_model()
        self._config = self._load_config(branching)
        self._refuse_split_groups()
        self._warn_of_other_loss(branching)
        self._places: list[_Place] = []
        self._early: dict[str, list[Tensor]] = {}  # rewards that were needed while trees grew, by task
        self._early_extra: dict[str, dict[str, list[Any]]] = {}  # and what reward functions logged with log_extra
        self._needs_rewards = False  # whether the policy looks at rewards while trees grow
        self._rewards = torch.empty(0)  # per row and function
        self._inputs: list[dict[str, Any]] = []
        self._failed_calls = 0
        self._batches = {"train": (-1, 0), "eval": (-1, 0)}  # the step of the last batch, and its number in that step
        self._agent: Agent | None = None
        self._format = self._build_format()

    # Settings and checks

    def _load_config(self, branching: Preset) -> Config:
        """The preset with what GRPOConfig says of sampling."""
        calls = min(self.max_tool_calling_iterations, MAX_CALLS)
        rollout = {
            "num_trajectories": self.num_generations,
            "max_tokens": self.max_completion_length,
            "max_tool_calls": calls,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or 0,
            "max_seconds": MAX_SECONDS,  # TRL has no limit of time
        }
        config = load_preset(branching, rollout=rollout)
        wanted = SCALES[config.advantage.scale]
        if self.scale_rewards not in ("group", wanted):
            raise ArpoError(
                f'scale_rewards = "{self.scale_rewards}": advantages are computed as the preset says, which has '
                f'"{wanted}"; leave scale_rewards out, or give a TOML file with the scale under [advantage]'
            )
        return config

    def _refuse_unsupported_model(self) -> None:
        if self._is_vlm:
            raise ArpoError("TreeGRPOTrainer trains language models without images; use GRPOTrainer for this model")
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ArpoError(
                "TreeGRPOTrainer samples from the trained model itself, which must be whole on each device: turn off "
                "FSDP and DeepSpeed (several processes with DDP are fine)"
            )
        model = self.accelerator.unwrap_model(self.model)
        if is_peft_model(model) and any(config.is_prompt_learning for config in model.peft_config.values()):
            raise ArpoError(
                "peft_config: prompt tuning and prefix tuning are not part of the layers that trees are sampled from; "
                "use an adapter such as LoRA"
            )
        check_supported(self._base_model().config)

    def _refuse_split_groups(self) -> None:
        """Raise unless every process gets whole groups, and what needs the rewards of all is in one process."""
        args, config = self.args, self._require_config()
        for name, rows, group in (
            ("train", args.per_device_train_batch_size * args.steps_per_generation, self.num_generations),
            ("eval", args.per_device_eval_batch_size, self.num_generations_eval),
        ):
            if rows % group and (name == "train" or self.eval_dataset is not None):
                raise ArpoError(
                    f"a tree is sampled by one process, but its {rows} rows per {name} batch are no multiple of "
                    f"{group} generations: change per_device_{name}_batch_size"
                )
        if self.accelerator.num_processes == 1:
            return
        alone = {
            f'branching.policy = "{config.branching.policy}"': config.branching.policy in REWARD_POLICIES,
            f'branching.fill = "{config.branching.fill}"': config.branching.fill != "all",
            'advantage.baseline = "batch"': config.advantage.baseline == "batch",
            'advantage.scale = "batch"': config.advantage.scale == "batch",
            "advantage.entropy_weight": config.advantage.entropy_weight > 0,
        }
        found = [name for name, used in alone.items() if used]
        if found:
            raise ArpoError(f"{found[0]}: this preset needs all trees in one process; use one, or another preset")

    def _warn_of_other_loss(self, branching: Preset) -> None:
        """Log where the preset's loss is not the one that GRPOConfig describes: that one is used."""
        try:
            wanted = loss_arguments(branching)
        except ArpoError as error:
            _logger.warning("the loss is that of GRPOConfig: %s", error)
            return
        ours = {name: getattr(self.args, name) for name in wanted if name != "scale_rewards"}
        if ours.get("epsilon_high", 0.0) is None:
            ours["epsilon_high"] = self.args.epsilon
        other = [f"{name}={wanted[name]!r} (is {value!r})" for name, value in ours.items() if value != wanted[name]]
        if other:
            _logger.warning(
                "the loss is that of GRPOConfig; the preset's has %s. To take it, use "
                "GRPOConfig(..., **arpo.integrations.trl.loss_arguments(...))",
                ", ".join(other),
            )

    def _require_config(self) -> Config:
        assert self._config is not None
        return self._config

    # The agent

    def _base_model(self) -> Any:
        """The causal LM whose layers are trained; adapters are inside them."""
        model = self.accelerator.unwrap_model(self.model)
        return model.get_base_model() if is_peft_model(model) else model

    def _template_tokenizer(self) -> Any:
        """The tokenizer with the chat template that TRL uses in training."""
        tokenizer = copy.copy(self._tokenizer)
        if self.chat_template is not None:
            tokenizer.chat_template = self.chat_template
        return tokenizer

    def _build_format(self) -> CallFormat:
        """How the model writes calls and reads results, by its chat template."""
        tools = [self._build_tool(function) for function in self.tools]
        self._toolset = Toolset(tools)
        specs = [tool.spec for tool in tools]
        try:
            return build_format("native", specs, self._template_tokenizer(), None, self.chat_template_kwargs)
        except ArpoError as error:
            reason = str(error).removeprefix("rollout.format: ").removesuffix("; use tags or json")
            raise ArpoError(f"TreeGRPOTrainer: {reason}; use another chat template, or arpo.Trainer") from None

    def _build_tool(self, function: Callable[..., Any]) -> Tool:
        """A tool as TRL calls it: plain functions one after another, in this thread; async ones on TRL's event loop.

        What a function raises becomes the result that TRL makes of it.
        """
        is_async = inspect.iscoroutinefunction(function)

        async def run(**named: Any) -> str:
            try:
                if is_async:
                    future = asyncio.run_coroutine_threadsafe(function(**named), self.async_loop)
                    return str(await asyncio.wrap_future(future))
                return str(function(**named))
            except (ToolError, ToolTimeout, ToolUnavailable):
                raise
            except Exception as error:
                self._failed_calls += 1
                return str({"error": str(error)})

        try:
            spec = build_spec(function)
        except TypeError as error:
            raise ArpoError(f"tools: {error}") from None
        return Tool(spec, run, timeout=MAX_SECONDS, retries=0, max_chars=NO_CUT, quick=not is_async)

    def _open_agent(self, longest_prompt: int) -> Agent:
        """The agent around the trained model; it is built once, for batches of training even if evaluation is first."""
        if self._agent is None:
            config, model, tokenizer = self._require_config(), self._base_model(), self._template_tokenizer()
            rows = self.args.per_device_train_batch_size * self.args.steps_per_generation
            sequences = min(config.rollout.concurrency, rows)
            length = min(model.config.max_position_embeddings, 2 * longest_prompt + self.max_completion_length)
            wanted = (sequences + 1) * (length + BLOCK_SIZE)
            engine = LocalEngine(
                model,
                tokenizer,
                max_num_seqs=sequences,
                kv_cache_tokens=config.rollout.kv_cache_tokens or min(wanted, default_kv_cache_tokens(model, rows)),
                threaded=False,
                end_tokens=turn_end_tokens(model, tokenizer) | set(self.eos_token_ids),
            )
            encoder = _GivenPrompts(tokenizer, self._format, engine.capabilities.max_context)
            self._agent = Agent(engine, tokenizer, self._toolset, self._format, NO_CUT, encoder)
        return self._agent

    # Sampling

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch of completions, with advantages of shape (rows, tokens)."""
        if self._config is None:
            return super()._generate_and_score_completions(inputs)  # type: ignore[no-any-return]
        if not is_conversational(inputs[0]):
            raise ArpoError(
                'prompts: TreeGRPOTrainer needs conversations, like [{"role": "user", "content": "..."}]: tools are '
                "described by the chat template"
            )
        self._inputs = inputs
        return self._with_credits(super()._generate_and_score_completions(inputs))

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, num_generations: int, **named: Any
    ) -> Any:
        """Sample the trees of these prompts; returns the first turn of each trajectory, as TRL expects."""
        if self._config is None:
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, **named)
        trees = self._sample(prompt_ids, num_generations)
        self.trees = trees
        self._places = [
            _Place(number, leaf if leaf < len(scored.tree.leaves) else None)
            for number, scored in enumerate(trees)
            for leaf in range(num_generations)
        ]
        first = [next(iter(row_nodes(*self._at(place))), None) for place in self._places]
        turns = [
            None if node is None else trees[place.tree].tree.nodes[node]
            for node, place in zip(first, self._places, strict=True)
        ]
        pad = self._tokenizer.pad_token_id
        return (
            [[pad] if turn is None else list(turn.tokens) for turn in turns],
            [[0.0] if turn is None else list(turn.logprobs) for turn in turns],
        )

    def _at(self, place: _Place) -> tuple[RolloutTree, int]:
        """The tree and the leaf of a row; a row without a leaf repeats the first one, masked."""
        return self.trees[place.tree].tree, place.leaf or 0

    def _sample(self, prompt_ids: list[list[int]], group: int) -> list[ScoredTree]:
        """The trees of a batch, each from `group` equal prompts; in evaluation they do not branch."""
        config = self._require_config()
        mode = "train" if self.model.training else "eval"
        rollout, branching = config.rollout, config.branching
        if mode == "eval":
            rollout = rollout.model_copy(update={"num_trajectories": group, "num_initial": group})
            branching = type(branching)(policy="never")
        starts = range(0, len(prompt_ids), group)
        for start in starts:
            if any(ids != prompt_ids[start] for ids in prompt_ids[start : start + group]):
                raise ArpoError(f"{group} rows in a row must have the same prompt: do not change the trainer's sampler")
        step, count = self._batches[mode]
        count = count + 1 if step == self.state.global_step else 0  # so seeds survive evaluations and a resumption
        self._batches[mode] = self.state.global_step, count
        self._needs_rewards = branching.policy in REWARD_POLICIES or branching.fill == "informative"
        self._early, self._early_extra, self._failed_calls = {}, {}, 0
        seed = (self.args.seed, "trl", mode, self.state.global_step, count, self.accelerator.process_index)
        seeds = [derive_seed(*seed, start) for start in starts]
        tasks = [self._task(start, prompt_ids[start]) for start in starts]
        agent = self._open_agent(max(map(len, prompt_ids)))

        async def sample() -> list[ScoredTree]:
            await agent.engine.sync_weights(self.state.global_step)
            return await sample_trees(agent, tasks, rollout, branching, seeds, self._score)

        was_training = self.model.training
        self.model.eval()  # no dropout, no checkpointing
        try:
            with torch.no_grad():
                return self._run(sample())
        finally:
            self.model.train(was_training)

    def _task(self, row: int, prompt_ids: list[int]) -> Task:
        """The task of the tree that starts at this row of the batch."""
        columns = {name: value for name, value in self._inputs[row].items() if name != "prompt"}
        message = self._inputs[row]["prompt"][-1].get("content")
        question = message if isinstance(message, str) and message.strip() else "(no text)"
        meta = {**shorten_columns(columns, MAX_COLUMN_CHARS), "prompt_ids": list(prompt_ids)}
        return Task(str(row), question, meta=meta)

    @staticmethod
    def _run(coroutine: Coroutine[Any, Any, list[ScoredTree]]) -> list[ScoredTree]:
        """Run a coroutine in this thread, or in another one if an event loop runs here, as in notebooks."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(coroutine)
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(asyncio.run, coroutine).result()

    def _tool_call_loop(
        self, prompts: list[Any], prompt_ids: list[list[int]], completion_ids: Any, completions: Any, *rest: Any
    ) -> Any:
        """What TRL's tool loop returns, read from the trees: the calls have been made, shared ones once."""
        if self._config is None:
            return super()._tool_call_loop(prompts, prompt_ids, completion_ids, completions, *rest)
        rows = [self._row(place) for place in self._places]
        pad = self._tokenizer.pad_token_id
        called = [node.result for scored in self.trees for node in scored.tree.nodes if node.result is not None]
        return (
            [list(row.mask) or [0] for row in rows],
            [self._messages(place, ids) for place, ids in zip(self._places, prompt_ids, strict=True)],
            [list(row.tokens) or [pad] for row in rows],
            [list(row.logprobs) or [0.0] for row in rows],
            len(called),
            self._failed_calls + sum(result.fault is not None for result in called),
            [[] for _ in rows],
        )

    def _row(self, place: _Place, token_weights: Any = None) -> Row:
        """The row of a place; a row without a leaf is masked."""
        scored = self.trees[place.tree]
        row = tree_row(scored, place.leaf or 0, *([] if token_weights is None else [token_weights]))
        if place.leaf is not None:
            return row
        count = len(row.tokens)
        return replace(row, mask=(0,) * count, advantages=(0.0,) * count, weight=0.0)

    def _messages(self, place: _Place, prompt_ids: Sequence[int]) -> list[dict[str, Any]]:
        """The completion as TRL gives it to reward functions: what the model said, and results."""
        tree, leaf = self._at(place)
        return messages_of(tree, row_nodes(tree, leaf), prompt_ids, self._tokenizer, self.tools)

    # Rewards and credit

    async def _score(self, tree: RolloutTree, states: Sequence[Any] = ()) -> ScoredTree:
        """The tree with its rewards, if they are needed while it grows; else with zeros until the batch is scored."""
        if not self._needs_rewards:
            return self._scored(tree, torch.zeros(len(tree.leaves), 1), torch.ones(1))
        row, leaves = int(tree.task.id), range(len(tree.leaves))
        nodes, prompt = [row_nodes(tree, leaf) for leaf in leaves], tree.nodes[0].tokens
        rewards = super()._calculate_rewards(
            [self._inputs[row]] * len(leaves),
            [self._inputs[row]["prompt"]] * len(leaves),
            [messages_of(tree, own, prompt, self._tokenizer, self.tools) for own in nodes],
            [[token for index in own for token in tree.nodes[index].tokens] for own in nodes],
        )
        before = self._early.setdefault(tree.task.id, [])
        extra = self._early_extra.setdefault(tree.task.id, {})
        for column, values in self._pending_extra_logs.items():
            extra.setdefault(column, [None] * len(before)).extend(values)
        self._pending_extra_logs.clear()
        before.extend(rewards)
        return self._scored(tree, rewards, self.reward_weights)

    def _scored(self, tree: RolloutTree, rewards: Tensor, weights: Tensor) -> ScoredTree:
        """The tree with the weighted sums of these rewards; what has none, or what a broken tool spoiled, is masked."""
        missing = rewards.isnan().all(dim=1).tolist()
        totals = (rewards.double().cpu() * weights.double().cpu()).nansum(dim=1).tolist()
        mask_faults = self._require_config().train.mask_infra_faults
        mask = [
            not (absent or (trajectory.infra_fault and mask_faults))
            for absent, trajectory in zip(missing, tree.trajectories, strict=True)
        ]
        return ScoredTree(tree, tuple(map(Reward, totals)), mask=tuple(mask))

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> Tensor:
        """TRL's rewards, per row and function; rows without a leaf have none (NaN)."""
        if self._config is None:
            plain: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            return plain
        real = [row for row, place in enumerate(self._places) if place.leaf is not None]
        found: Tensor
        if self._needs_rewards:  # one process
            tasks = [scored.tree.task.id for scored in self.trees]
            found = torch.stack([one for task in tasks for one in self._early[task]])
            for column in {column for task in tasks for column in self._early_extra[task]}:
                for task in tasks:
                    values = self._early_extra[task].get(column, [])
                    self._pending_extra_logs[column] += [*values, *[None] * (len(self._early[task]) - len(values))]
        else:
            columns = (inputs, prompts, completions, completion_ids_list)
            found = super()._calculate_rewards(*([column[row] for row in real] for column in columns))
        if len(real) < len(self._places):
            rewards = found.new_full((len(self._places), found.shape[1]), torch.nan)
            rewards[real] = found
            found = rewards
            for column, values in self._pending_extra_logs.items():
                by_row = dict(zip(real, values, strict=True))
                self._pending_extra_logs[column] = [by_row.get(row) for row in range(len(self._places))]
        first = self.accelerator.process_index * len(self._places)
        self._rewards = found[first : first + len(self._places)].cpu()
        return found

    def _with_credits(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with the advantages of the trees in place of TRL's, and without masked trajectories."""
        settings = self._require_config().advantage
        scored = [
            self._scored(tree.tree, self._rewards[self._rows_of(number)], self.reward_weights)
            for number, tree in enumerate(self.trees)
        ]
        self.trees = compute_credits(scored, settings)
        token_weights = entropy_weights(self.trees, settings.entropy_weight)
        rows = [self._row(place, token_weights) for place in self._places]
        device, width = batch["completion_ids"].device, batch["completion_ids"].shape[1]
        advantages = torch.tensor([[*row.advantages, *[0.0] * (width - len(row.advantages))] for row in rows])
        weights = torch.tensor([row.weight for row in rows], device=device)
        tool_mask = batch["tool_mask"] * (weights > 0).long()[:, None]
        loss_mask = batch["completion_mask"] * tool_mask
        factors = self._row_factors(weights, loss_mask.sum(dim=1))
        self._log_trees()
        return {
            **batch,
            "tool_mask": tool_mask,
            "num_items_in_batch": self.accelerator.gather(loss_mask.sum()).sum(),
            "advantages": advantages.to(device) * factors[:, None],
        }

    def _rows_of(self, number: int) -> list[int]:
        """The rows of a tree's leaves."""
        return [row for row, place in enumerate(self._places) if place.tree == number and place.leaf is not None]

    def _row_factors(self, weights: Tensor, counts: Tensor) -> Tensor:
        """Factors that turn TRL's means into those of arpo: weighted, and without masked rows; 1 if there are neither.

        A mean over tokens is divided by all unmasked tokens in TRL, and by their weighted number here; a mean over rows
        by all rows, and here by the weights.
        """
        if self.loss_type in PER_TOKEN_LOSSES:
            sums = [(counts * (weights > 0)).sum(), (counts * weights).sum()]
        else:
            sums = [torch.ones_like(weights).sum(), weights.sum()]
        theirs, ours = self.accelerator.gather(torch.stack([one.double() for one in sums])[None]).sum(dim=0)
        return (weights * (theirs / ours if ours > 0 else 1.0)).float()

    def _log_trees(self) -> None:
        """Log metrics of the trees, and their advantages in place of TRL's in the table of completions."""
        trees, mode = self.trees, "train" if self.model.training else "eval"
        nodes = [node for scored in trees for node in scored.tree.nodes]
        counts = {
            "branches": sum(node.decision.branches for node in nodes if node.decision is not None),
            "tool_calls": sum(scored.tree.tool_calls for scored in trees),
            "sampled_tokens": sum(len(node.tokens) for node in nodes if node.kind is Kind.MODEL),
            "informative_groups": sum(scored.has_learning_signal for scored in trees),
            "trees": len(trees),
        }
        local = torch.tensor(list(counts.values()), device=self.accelerator.device, dtype=torch.float64)
        sums = dict(zip(counts, self.accelerator.gather(local[None]).sum(dim=0).tolist(), strict=True))
        sums["informative_groups"] /= sums.pop("trees")
        for name, value in sums.items():
            self._metrics[mode][f"tree/{name}"].append(value)
        shown = gather_object(
            [0.0 if at.leaf is None else trees[at.tree].credits[at.leaf].advantage for at in self._places]
        )
        logged = self._logs["advantages"]
        for _ in range(min(len(shown), len(logged))):
            logged.pop()
        logged.extend(shown)


def messages_of(
    tree: RolloutTree, nodes: Sequence[int], prompt_ids: Sequence[int], tokenizer: Any, tools: list[Any]
) -> list[dict[str, Any]]:
    """The messages of these nodes after a prompt, as TRL's tool loop makes them: parsed turns, and tool results."""
    messages: list[dict[str, Any]] = []
    before = list(prompt_ids)
    for index in nodes:
        node = tree.nodes[index]
        if node.kind is Kind.MODEL:
            messages.append(parse_response(tokenizer, list(node.tokens), prefix=list(before), tools=tools))
        else:
            assert node.call is not None and node.result is not None
            messages.append({"role": "tool", "name": node.call.name, "content": node.result.text})
        before += node.tokens
    return messages or [{"role": "assistant", "content": ""}]


def _refuse_unsupported(given: dict[str, Any]) -> None:
    """Raise for arguments of GRPOTrainer that this trainer cannot follow."""
    args = given.get("args")
    if not given.get("tools"):
        raise ArpoError(
            'tools: trees branch after tool results; give tools, or use branching="never" for a plain GRPOTrainer'
        )
    for name, reason in (
        ("rollout_func", "the trainer samples trees itself"),
        ("environment_factory", "a tree needs environments that fork; use arpo.Trainer(environment=...)"),
    ):
        if given.get(name) is not None:
            raise ArpoError(f"{name}: {reason}")
    if args is None:
        return
    engine = "trees are sampled by arpo's local engine"
    refused = {
        "use_vllm": (False, f"{engine}; for vLLM use arpo.Trainer(rollout={{'engine': 'vllm'}})"),
        "use_transformers_continuous_batching": (False, f"{engine}, which has continuous batching"),
        "min_p": (None, f"{engine}, which has temperature, top_p and top_k"),
        "repetition_penalty": (1.0, f"{engine}, which has temperature, top_p and top_k"),
        "generation_kwargs": (None, f"{engine}, which has temperature, top_p and top_k"),
        "cache_implementation": (None, f"{engine}, which has a cache of its own"),
        "multi_objective_aggregation": ("sum_then_normalize", "a trajectory has one reward, the sum of all"),
    }
    for name, (default, reason) in refused.items():
        if getattr(args, name) not in (default, {} if default is None else default):
            raise ArpoError(f"{name} = {getattr(args, name)!r}: {reason}; leave it out")
