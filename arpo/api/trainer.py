"""The trainer for callers in Python: one call trains a model on tasks with tools, all given as Python objects.

    trainer = arpo.Trainer("Qwen/Qwen3-0.6B", tasks=rows, tools=[price], reward=my_reward, preset="arpo")
    trainer.train(steps=50)

It is the training of `arpo train`: the same settings, run directory and numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from arpo.api.agent import Agent
from arpo.api.settings import (
    EnvironmentArgument,
    ModelArgument,
    ProgramArgument,
    RewardArgument,
    TasksArgument,
    ToolsArgument,
    path_text,
    require_model,
    resolve,
)
from arpo.api.thread import stoppable
from arpo.config.files import expand_user
from arpo.config.plugins import GIVEN, Objects
from arpo.config.schema import Config
from arpo.data.task_set import require_test_tasks
from arpo.errors import ArpoError
from arpo.evaluation.evaluate import Evaluation
from arpo.trainer.dist import launch
from arpo.training.context import RolloutContext
from arpo.training.export import save_agent
from arpo.training.loop import Training, evaluate_policy, extend_training, prepare_training, train
from arpo.training.sampler import LocalSampler


class Trainer(Agent):
    """Trains a model to use tools. It is also an `Agent`: it can be asked and evaluated before and after training."""

    def __init__(
        self,
        model: ModelArgument | None = None,
        *,
        tasks: TasksArgument | None = None,
        tools: ToolsArgument | None = None,
        reward: RewardArgument | None = None,
        environment: EnvironmentArgument | None = None,
        program: ProgramArgument | None = None,
        test: TasksArgument | None = None,
        tokenizer: Any = None,
        preset: str | None = None,
        config: str | os.PathLike[str] | Config | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
        seed: int | None = None,
        callbacks: Iterable[Any] = (),
        progress: bool = True,
        **settings: Mapping[str, Any],
    ) -> None:
        """Load the model, the tasks and the tools, and check them. What is not given has its default.

        Args:
            model: a hub name, a directory, a GGUF file, "tiny" (built in), or a loaded model of transformers with its
                `tokenizer`, which is then trained itself; with train={"lora_rank": ...} it keeps the adapter
            tasks: what to train on: rows (dicts with "question" and "answer", other columns are free), a data set of
                the `datasets` package, `arpo.Task`s, or a file
            tools: what the model may call: functions with type hints and a docstring, bound methods, names of built-in
                tools ("python", "search"), "path/to/file.py:name", `arpo.Mcp` servers. Not given: "python", or with an
                environment only its tools; []: none
            reward: a function of a trajectory, or of (trajectory, environment), that returns a number or an
                `arpo.Reward`; several with weights, {correct: 1.0, short: 0.2}; or how answers are compared: "f1",
                "em", "number", "math", "choice"
            environment: a class derived from `arpo.Environment`, a function that makes one, or a name
            program: an agent of its own that asks the model at a local endpoint, run once per trajectory: a function of
                (task, endpoint), a command as a list of words, or "path/to/file.py:name"; it brings its own tools
            test: held-out tasks, like `tasks`
            tokenizer: the tokenizer of a loaded model
            preset: the algorithm: "arpo", "grpo", "dapo" and others, or a TOML file of settings
            config: a TOML file, the config.json of a run or an `arpo.Config`; the other arguments override it
            output_dir: where the run is written; default: a new directory in runs/
            resume: continue the run in `output_dir` from its last checkpoint, with the same arguments
            seed: the seed of all random numbers
            callbacks: functions of (step, metrics), or `arpo.Callback`s
            progress: whether steps and messages are logged, on stderr if the program has not set up logging
            settings: sections of settings by name: train={"lr": 1e-5}, rollout={"num_trajectories": 8}. A dict given
                as `model`, `tools`, `reward` or `environment` is such a section, too
        """
        require_model(model, config)
        if not isinstance(resume, bool):
            raise ArpoError(f"resume: got {resume!r:.100}, expected True or False; output_dir names the run")
        if tasks is None and config is None and "data" not in settings:
            raise ArpoError(
                'tasks: give tasks to train on: rows, a data set or a file; "world" is the built-in toy world'
            )
        resolved, objects = resolve(
            model=model,
            tokenizer=tokenizer,
            tasks=tasks,
            test=test,
            tools=tools,
            reward=reward,
            environment=environment,
            program=program,
            preset=preset,
            config=config,
            seed=seed,
            settings=settings,
            known=("output_dir", "resume", "callbacks", "progress"),
        )
        if launch.world_size() > 1:
            raise ArpoError("arpo.Trainer trains in one process; under torchrun, use `arpo train` with a TOML file")
        self._context: RolloutContext | None = None
        self._begin(resolved, callbacks, progress)
        with self._closed_on_error():
            self.config = self._choose_directory(resolved, output_dir, resume)
            self._reporter.log(f"loading {resolved.model.path.removeprefix(GIVEN)}")
            build_sampler = self._connect(objects) if self.config.cluster.address is not None else None
            prepared = prepare_training(self.config, resume, build_sampler, self._reporter, objects)
            self._prepared = self._stack.enter_context(prepared)
            if isinstance(self._prepared.sampler, LocalSampler):
                self._context = self._prepared.sampler.context
        self._training: Training | None = None

    def _choose_directory(self, config: Config, output_dir: str | os.PathLike[str] | None, resume: bool) -> Config:
        """The configuration with the run's directory; an automatic one is taken by an empty directory."""
        if output_dir is not None:
            chosen = path_text("output_dir", output_dir)
        elif "dir" in config.run.model_fields_set:
            return config
        elif resume:
            raise ArpoError("resume: name the run to continue with output_dir")
        else:
            chosen = str(_take_directory(Path("runs"), Path(config.preset).stem))
            self._stack.callback(_remove_if_empty, Path(chosen))
        return config.model_copy(update={"run": config.run.model_copy(update={"dir": str(chosen)})})

    def _connect(self, objects: Objects) -> Any:
        if objects:
            names = ", ".join(name.removeprefix(GIVEN) for name in objects)
            raise ArpoError(
                f"cluster.address: Python objects cannot travel to other machines: {names}. Name what is in files: "
                'tools=["path/to/file.py:name"], reward="path/to/file.py:name", tasks="tasks.jsonl", model="directory"'
            )
        if self.config.cluster.trainers > 1:
            raise ArpoError("cluster.trainers: arpo.Trainer trains in one process; use `arpo train` with a TOML file")
        from arpo.cluster.ray_backend import connect

        return self._stack.enter_context(connect(self.config, self._reporter))

    @property
    def output_dir(self) -> Path:
        """The directory of the run. Nothing is written to it before `train`."""
        return expand_user(self.config.run.dir)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of all steps of the run so far, one dict each, with its "step"."""
        run = self._prepared.start.run if self._training is None else self._training.checkpoints.run
        return [] if run is None else run.read_metrics()

    @property
    def model(self) -> Any:
        """The transformers model that is trained."""
        return self._prepared.model

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._prepared.tokenizer

    def train(self, steps: int | None = None) -> list[dict[str, Any]]:
        """Train for `steps` further steps, or without it until the run has `train.steps`; returns their metrics.

        May be called again to go on. Ctrl-C and a notebook's interrupt end it after the last complete step, which is
        saved. Any other error closes the trainer; the run can be resumed from its last checkpoint.
        """
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise ArpoError(f"steps: got {steps!r:.100}, expected a number of training steps from 1 on")
        self._require_open()
        done = self._open_run(steps)
        assert self._training is not None
        try:
            with stoppable(), contextlib.suppress(asyncio.CancelledError):  # of `stop`
                self._thread.run(train(self._training))
        except KeyboardInterrupt:
            self._reporter.message(f"stopped; the run is saved in {self.output_dir}, and train() continues it")
            raise
        except BaseException as error:
            if isinstance(error, SystemExit):
                self._reporter.message(f"stopped; the run is saved in {self.output_dir}, continue it with resume=True")
            self.close()
            raise
        return [record for record in self.metrics if record["step"] > done]

    def stop(self) -> None:
        """End `train` after the last complete step, from a callback or another thread; it returns as usual."""
        self._thread.cancel()

    def _open_run(self, steps: int | None) -> int:
        """Open the run, or extend it, for so many further steps; returns the number of steps done."""
        if self._training is None:
            done = self._prepared.start.step
            last = self.config.train.steps if steps is None else done + steps
            self._reporter.log(f"writing the run to {self.output_dir}")
            self._training = self._stack.enter_context(self._prepared.with_steps(last).open())
        else:
            records = self.metrics
            done = records[-1]["step"] if records else self._training.checkpoints.start_step
            last = self.config.train.steps if steps is None else done + steps
            self._training = extend_training(self._training, done, last)
        return done

    def evaluate(
        self, tasks: TasksArgument | None = None, *, samples: int | None = None, k: Sequence[int] = (1,)
    ) -> Evaluation:
        """Accuracy, reward and pass@k on tasks, each asked `samples` times (default: the largest of `k`).

        Without `tasks`, the first `eval.questions` of the test tasks are used.
        """
        if self._context is None:  # on a cluster
            if tasks is not None or samples is not None or tuple(k) != (1,):
                raise ArpoError("on a cluster, evaluate() takes no arguments: set test=, and eval={...}")
            evaluation = evaluate_policy(self._prepared.sampler, self._prepared.tasks, self.config, self._reporter)
            return self._thread.run(evaluation)
        if tasks is not None:
            return super().evaluate(tasks, samples=samples, k=k)
        require_test_tasks(self._prepared.tasks)
        return self._evaluate(self._prepared.tasks.test[: self.config.eval.questions], samples, k)

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Write the agent to a directory: model and tokenizer as transformers and vLLM read them, and its agent file.

        `arpo.load_agent` and `arpo chat DIR` open it. A trained adapter is merged into the model. The directory must be
        new or empty, or hold an agent that was saved before, which is replaced.
        """
        target, prepared = expand_user(os.fspath(directory)), self._prepared
        save_agent(target, self.model, self.tokenizer, self.config, prepared.tools, prepared.objects)
        return target


def _take_directory(parent: Path, name: str) -> Path:
    """Create the first of `name`, `name-2`, `name-3` that does not exist."""
    number = 1
    while True:
        directory = parent / (name if number == 1 else f"{name}-{number}")
        try:
            directory.mkdir(parents=True)
            return directory
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ArpoError(f"{directory}: cannot be created: {error.strerror}; give output_dir") from None


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()
