"""The agent: how a model and its tools hold a dialogue.

    formats       call formats ("tags", "json"), prompts, tool calls and results as tokens
    turn_loop     the one loop: sample a turn, find the call, make it, append the result
    agent         an engine with tokenizer, tools and call format
    conversation  a chat with an agent
    program       agents that run their own loop; `endpoint` is where they ask, `messages` turns what they ask into
                  tokens, `program_run` records it and replays it for branches
    traces        recorded dialogues read from files; `examples` puts them into prompts
    detokenize    token ids to text as they arrive, and where each token ends

May import: types, errors, config, net, figures, runs, data, tools, rewards, models, engine.
"""
