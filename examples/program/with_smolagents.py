"""An agent of smolagents: `pip install 'smolagents[openai]'`, then `python examples/program/with_smolagents.py`.

smolagents rewrites the model's messages before it sends them back, so that every request starts a conversation of its
own. Each is trained in the context in which it was asked, and all share the credit of their run. The built-in model has
never seen such messages and learns nothing from them: put a model that follows instructions into `world.train`.
"""

from __future__ import annotations

from typing import Any

from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool
from smolagents.utils import AgentError
from world import main, read_answer
from world import search as search_world


@tool
def search(query: str) -> str:
    """Search the document collection with a few key words; returns the best matching documents.

    Args:
        query: the key words
    """
    return search_world(query)


def agent(task: Any, endpoint: Any) -> str:
    """Answer a question with the tool."""
    model = OpenAIServerModel(endpoint.model, endpoint.base_url, endpoint.api_key)
    researcher = ToolCallingAgent([search], model, max_steps=4, verbosity_level=LogLevel.OFF)
    try:
        return read_answer(str(researcher.run(task.question)))
    except AgentError:  # the model's mistake, not the program's: a wrong answer
        return ""


if __name__ == "__main__":
    main(agent)
