"""An agent of the OpenAI Agents SDK: `pip install openai-agents`, then `python examples/program/with_openai_agents.py`.

Nothing in it is of arpo, but for where its client gets its address and key.
"""

from __future__ import annotations

from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from openai import AsyncOpenAI
from world import main, read_answer, search

set_tracing_disabled(True)
TOOL = function_tool(search)


async def agent(task: Any, endpoint: Any) -> str:
    """Answer a question with the tool."""
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        model = OpenAIChatCompletionsModel(model=endpoint.model, openai_client=client)
        researcher = Agent("researcher", instructions="Answer the question.", tools=[TOOL], model=model)
        try:
            result = await Runner.run(researcher, task.question, max_turns=6)
        except (MaxTurnsExceeded, ModelBehaviorError):  # the model's mistake, not the program's: a wrong answer
            return ""
    return read_answer(result.final_output)


if __name__ == "__main__":
    main(agent)
