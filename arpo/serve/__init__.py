"""An agent for others: an OpenAI-compatible server behind which the agent runs its own tool loop.

    app        routes, keys, chat completions as one reply or as a stream
    service    conversations at once, their limits, their end when a client goes away or the server stops
    messages   requests and replies in OpenAI's form
    http       HTTP/1.1 on asyncio, bounded in everything that a client decides
    metrics    counters and histograms in Prometheus' text form
    keys       API keys from the environment or a file
    mcp        the agent as one tool of an MCP server

May import: types, errors, config, net, figures, runs, data, tools, environments, rewards, models, engine, agent.
"""
