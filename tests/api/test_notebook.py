"""The API in a real Jupyter kernel, which runs an event loop itself. Skipped where Jupyter is not installed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fruit
import pytest

from arpo.runs.run_dir import open_run_dir

jupyter_client = pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")
NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
SECONDS = 500  # a hang guard
CELL = f"""
import sys
sys.path.insert(0, {str(Path(fruit.__file__).parent)!r})
import arpo, asyncio, fruit
asyncio.get_running_loop()  # raises if there is none
trainer = arpo.Trainer(
    MODEL, tasks=fruit.ROWS, tools=[fruit.price], reward=fruit.even_tokens, output_dir="run", **fruit.SMALL
)
"""


class Kernel:
    """A running kernel."""

    def __init__(self, folder: Path) -> None:
        self.manager, self.client = jupyter_client.manager.start_new_kernel(cwd=str(folder), env=dict(os.environ))

    def run(self, code: str, interrupt_at: str | None = None) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
        """Executes a cell; returns what it printed, what it displayed and the reply. Interrupts it at a text."""
        sent, printed, shown, busy = self.client.execute(code), "", list[dict[str, Any]](), True
        while busy:
            message = self.client.get_iopub_msg(timeout=SECONDS)
            if message["parent_header"].get("msg_id") != sent:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                printed += content["text"]
                if interrupt_at is not None and interrupt_at in printed:
                    self.manager.interrupt_kernel()
                    interrupt_at = None
            elif message["msg_type"] in ("execute_result", "display_data"):
                shown.append(content["data"])
            busy = message["msg_type"] != "status" or content["execution_state"] != "idle"
        while (reply := self.client.get_shell_msg(timeout=SECONDS))["parent_header"].get("msg_id") != sent:
            pass
        return printed, shown, reply["content"]

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.mark.slow
def test_the_example_and_the_interrupt_button(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    monkeypatch.setenv("ARPO_CACHE", str(tmp_path / "cache"))
    kernel = Kernel(tmp_path)
    try:
        # The example as it is, with a small random model in place of the one from the hub.
        displayed, texts = [], ""
        for cell in cells:
            source = (
                cell["source"].replace("Qwen/Qwen3-0.6B", str(model_dir)).replace('max_tokens": 256', 'max_tokens": 40')
            )
            printed, shown, reply = kernel.run(source)
            assert reply["status"] == "ok", reply
            displayed += shown
            texts += printed
            if "steps=2" in source:
                assert "step 2: reward" in printed  # in the output of this cell, not of the one that made the trainer
        assert [data.get("text/html", "")[:4] for data in displayed] == ["", "<svg", "", "<svg", "", ""]
        assert ": log-prob -" in texts and "P 0." in texts and "advantage +" in texts
        # The step went where the advantages say: turns became likelier, or less likely, by more the larger they are.
        assert kernel.run("print(sum(advantage * change for advantage, change in changes.values()))")[0][0] != "-"
        assert displayed[5]["text/plain"].startswith("<Evaluation of 12 tasks, 24 trajectories: accuracy")
        assert (tmp_path / "fruit-agent" / "model.safetensors").is_file()
        # Interrupted, it saves, and can go on.
        assert kernel.run(CELL.replace("MODEL", repr(str(model_dir))))[2]["status"] == "ok"
        _, _, reply = kernel.run("trainer.train(steps=100_000)", interrupt_at="step 2:")
        assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt"), reply
        run = open_run_dir(tmp_path / "run")
        steps = run.read_metrics()[-1]["step"]
        assert run.checkpoint_steps()[-1] == steps >= 2
        printed, _, reply = kernel.run("print(len(trainer.train(steps=1)), trainer.metrics[-1]['step'])")
        assert printed.splitlines()[-1] == f"1 {steps + 1}" or f"1 {steps + 1}\n" in printed, (printed, reply)
    finally:
        kernel.close()
