"""A LangGraph graph: `pip install langgraph langchain-openai`, then `python examples/program/with_langgraph.py`.

Nothing in it is of arpo, but for where its client gets its address and key.
"""

from __future__ import annotations

from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from world import main, read_answer, search

TOOLS = [tool(search)]


def agent(task: Any, endpoint: Any) -> str:
    """Answer a question with the tool: a node for the model, one for its tools."""
    model = ChatOpenAI(model=endpoint.model, base_url=endpoint.base_url, api_key=endpoint.api_key).bind_tools(TOOLS)
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(TOOLS))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    try:
        end = graph.compile().invoke({"messages": [("user", task.question)]}, {"recursion_limit": 12})
    except GraphRecursionError:  # the model's mistake, not the program's: a wrong answer
        return ""
    return read_answer(str(end["messages"][-1].content))


if __name__ == "__main__":
    main(agent)
