// The Playground: ask the agent of a run, watch its tree grow, change a setting and look again.

import { clear, el, mean, number, percent, plural, printable, problem, put, shorten, table, toggle } from "./dom.js";
import { detailPanel } from "./detail.js";
import { addEvent, emptyTree, endTree } from "./live.js";
import { correctMark, selection, showPicture } from "./picture.js";
import { api, get, postLines } from "./source.js";
import { go, parseIndex, readState } from "./state.js";
import { coordinatesOf } from "./trees.js";

const REDRAW = 80; // milliseconds between two pictures of a growing tree
const KEPT = 20; // questions
const TAU_POLICIES = ["entropy", "shuffled"];
const SETTINGS = [
  ["temperature", "temperature", { min: 0.01, step: "any" }, "sampling temperature"],
  ["num_trajectories", "M", { min: 1, step: 1 }, "trajectories in all"],
  ["num_initial", "N", { min: 1, step: 1 }, "trajectories that start at the prompt"],
  ["tau", "tau", { min: 0, max: 1, step: "any" }, "threshold on P: the lower, the more branches"],
  ["seed", "seed", { min: 0, step: 1 }, "the same seed and settings give the same tree"],
];
const board = { asks: [], made: 0, keys: {}, request: 0, timer: null, beside: new Set() };

export async function playgroundTab(main, state, run) {
  const request = ++board.request;
  if (board.run !== run.id) makeBoard(run);
  if (board.node.parentNode !== main) {
    main.replaceChildren(board.node);
    board.status = null;
  }
  try {
    if (!board.status || board.status.reason) {
      const status = await get(api("playground", { run: run.id }));
      board.coordinates = await coordinatesOf(run.id);
      if (request !== board.request) return;
      showStatus(status);
    }
    const wanted = [parseIndex(state.step), parseIndex(state.n)];
    if (!board.status.reason && !wanted.includes(null) && board.wanted !== wanted.join()) {
      board.wanted = wanted.join();
      await takeQuestion(...wanted);
    }
  } catch (error) {
    if (request === board.request) board.said.replaceChildren(problem(error));
  }
  update(readState());
}

// --- the form

function makeBoard(run) {
  Object.assign(board, { run: run.id, status: null, own: null, wanted: null, shown: null, keys: {}, drawn: {}, beside: new Set() });
  board.question = el("textarea", { id: "question", rows: 3, placeholder: "Ask the agent something", "aria-label": "Question" });
  board.question.addEventListener("input", () => update(readState()));
  board.question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask();
  });
  board.inputs = Object.fromEntries(SETTINGS.map(([name, , limits]) => [name, el("input", { type: "number", required: true, ...limits })]));
  const labels = SETTINGS.map(([name, label, , title]) => el("label", { title }, `${label} `, board.inputs[name]));
  board.ask = el("button", { type: "submit", class: "primary", title: "Ctrl-Enter" }, "Ask");
  board.stop = el("button", { type: "button", click: () => running()?.abort.abort() }, "Stop");
  board.take = el("button", { type: "button", click: () => takeQuestion().catch(say) }, "One of the run's questions");
  board.known = el("p", { class: "note" });
  board.form = el(
    "form",
    { class: "asking", hidden: true },
    board.question,
    el("div", { class: "bar" }, board.take, board.known),
    el("div", { class: "bar" }, ...labels, board.ask, board.stop),
  );
  board.form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  board.about = el("div");
  board.said = el("div", { role: "status" });
  board.history = el("div");
  board.head = el("div", { class: "task" });
  board.picture = el("div", { class: "picture" });
  board.detail = el("div");
  board.others = el("div");
  const shown = el("div", { class: "one" }, board.head, board.picture, board.detail);
  board.node = el("div", { class: "playground" }, board.about, board.form, board.said, board.history, shown, board.others);
}

function showStatus(status) {
  const first = !board.status && !board.inputs.seed.value;
  board.status = status;
  board.form.hidden = Boolean(status.reason);
  if (status.reason) {
    put(board.about, el("p", { class: "empty" }, printable(status.reason)));
    return;
  }
  const tools = status.tools.length ? `tools: ${printable(shorten(status.tools.join(", "), 200))}` : "no tools";
  const code = status.code.length > 0 && el("p", { class: "note code" }, "Asking runs code that the settings of this run name: ", el("code", {}, printable(shorten(status.code.join(", "), 400))), ". Ask only if you trust it.");
  put(board.about, el("p", { class: "note" }, `The agent of step ${number(status.checkpoint)}, the last checkpoint; ${tools}; branching policy ${printable(shorten(status.policy, 40))}. The model is loaded with the first question.`), code);
  board.question.maxLength = status.limits.question;
  for (const [name, input] of Object.entries(board.inputs)) {
    if (status.limits[name]) input.max = status.limits[name];
    if (first) input.value = status.settings[name];
  }
  board.inputs.tau.disabled = !TAU_POLICIES.includes(status.policy);
  if (board.inputs.tau.disabled) board.inputs.tau.title = `without effect: the branching policy is ${status.policy}`;
}

// A task of a recorded tree; without a number, the next one of the last step with trees.
async function takeQuestion(step, n) {
  const run = board.run;
  if (step === undefined) {
    const { steps } = await get(api("steps", { run }));
    if (!steps.length) throw new Error("This run has saved no trees, and so none of its questions (run.save_trees). Write one.");
    step = steps.at(-1);
    const { trees } = await get(api("prompts", { run, step }));
    n = trees[(board.own?.step === step ? board.own.n + 1 : 0) % trees.length]?.n ?? 0;
  }
  const { task } = await get(api("tree", { run, step, n }));
  if (run !== board.run) return;
  board.own = { step, n, question: task.question, answers: task.answers };
  board.question.value = task.question;
  clear(board.said);
  update(readState());
}

// --- asking

function running() {
  return board.asks.find((one) => one.state === "loading" || one.state === "sampling");
}

function say(error) {
  board.said.replaceChildren(problem(error));
}

async function ask() {
  if (!board.form.reportValidity() || running() || !board.status || board.status.reason) return;
  const settings = Object.fromEntries(Object.entries(board.inputs).map(([name, input]) => [name, Number(input.value)]));
  const own = board.own?.question === board.question.value ? board.own : null;
  const question = board.question.value;
  const made = { id: ++board.made, run: board.run, settings, own, state: "loading", note: "", revision: 0, abort: new AbortController() };
  made.tree = emptyTree({ id: "", question, answers: own?.answers ?? [], kind: "", meta: {} });
  const before = board.asks.findLast((one) => one.run === board.run && one.tree.nodes.length);
  board.asks.push(made);
  if (board.asks.length > KEPT) board.asks.shift();
  board.beside = new Set(before ? [before.id] : []);
  board.shown = made.id;
  clear(board.said);
  go({ node: null, leaf: null, chat: null }, { replace: true });
  update(readState());
  const body = { run: made.run, ...settings, ...(own ? { step: own.step, n: own.n } : { question }) };
  try {
    await postLines("/api/ask", body, { token: board.status.token, signal: made.abort.signal, receive: (event) => receive(made, event) });
    if (made.state === "sampling" || made.state === "loading") throw new Error("The server's answer ended early.");
  } catch (error) {
    if (made.abort.signal.aborted) Object.assign(made, { state: "stopped", note: "stopped" });
    else Object.assign(made, { state: "failed", note: error.message });
  }
  endTree(made.tree);
  made.revision += 1;
  update(readState());
}

function receive(made, event) {
  if (event.type === "note") made.note = event.text;
  else if (event.type === "ready") Object.assign(made, { state: "sampling", note: "" });
  else if (event.type === "done") made.state = "done";
  else if (event.type === "stopped") Object.assign(made, { state: "stopped", note: event.text });
  else if (event.type === "error") Object.assign(made, { state: "failed", note: event.text });
  addEvent(made.tree, event);
  made.revision += 1;
  board.timer ??= setTimeout(() => {
    board.timer = null;
    update(readState());
  }, REDRAW);
}

// --- drawing

function redraw(part, key, draw) {
  const text = JSON.stringify(key);
  if (board.keys[part] === text) return;
  board.keys[part] = text;
  draw();
}

function update(state) {
  if (!board.node?.isConnected || !board.status || board.status.reason) return;
  const busy = Boolean(running());
  board.ask.disabled = busy;
  board.stop.disabled = !busy;
  const own = board.own?.question === board.question.value;
  const answers = shorten((board.own?.answers ?? []).join(" or "), 160);
  const words = !board.own ? "" : !own ? "changed, so it has no reward" : answers ? `right answer: ${printable(answers)}` : "from the run's trees";
  board.known.textContent = words;
  const mine = board.asks.filter((one) => one.run === board.run);
  const shown = mine.find((one) => one.id === board.shown) ?? mine.at(-1);
  redraw("history", [mine.map((one) => [one.id, one.state, one.tree.leaves.length]), shown?.id, [...board.beside]], () => drawHistory(mine, shown));
  board.picture.hidden = !shown?.tree.nodes.length;
  if (!shown) return;
  redraw("head", [shown.id, shown.revision], () => drawHead(shown));
  if (!shown.tree.nodes.length) {
    clear(board.detail);
    board.keys.detail = null;
    return;
  }
  const { chosen, trajectory } = selection(shown.tree, state, followed(shown));
  redraw("picture", [shown.id, shown.revision, chosen, trajectory], () => drawMain(shown, chosen, trajectory));
  const node = chosen[0] === "n" ? shown.tree.nodes[chosen.slice(1)] : null;
  const content = [node?.tokens.length, node?.live, node?.result === null, node?.decision, shown.tree.leaves.length, shown.tree.credits.length];
  redraw("detail", [shown.id, chosen, trajectory, state.shade, shown.state, ...content], () =>
    board.detail.replaceChildren(detailPanel(shown.tree, state, chosen, trajectory, { run: shown.run, coordinates: board.coordinates, pictures: shown.tree.pictures })),
  );
  const beside = mine.filter((one) => one.id !== shown.id && board.beside.has(one.id));
  redraw("others", beside.map((one) => [one.id, one.revision]), () => drawOthers(beside));
}

// What is shown until something is chosen: the turn that is being sampled, then the first trajectory.
function followed(shown) {
  const { nodes, leaves } = shown.tree;
  if (shown.state === "done" && leaves.length) return "l0";
  const live = nodes.findIndex((node) => node.live);
  return `n${live >= 0 ? live : nodes.length - 1}`;
}

function drawMain(shown, chosen, trajectory) {
  const open = (item) => go(item[0] === "l" ? { leaf: item.slice(1), node: null, chat: 1 } : { node: item.slice(1), chat: null, leaf: trajectory });
  showPicture(board.picture, shown.tree, { chosen, trajectory, open });
}

function settingsText({ temperature, num_trajectories, num_initial, tau, seed }) {
  return `temperature ${number(temperature)}, M ${num_trajectories}, N ${num_initial}, tau ${number(tau)}, seed ${seed}`;
}

function stateText(shown) {
  if (shown.state === "loading") return shown.note ? `${printable(shorten(shown.note, 300))} …` : "waiting for the agent …";
  if (shown.state === "failed") return "failed";
  return shown.state === "done" ? "" : shown.state === "sampling" ? "sampling …" : printable(shorten(shown.note, 300));
}

function countsText(tree) {
  const sampled = tree.nodes.filter((node) => node.kind === "model").reduce((sum, node) => sum + node.tokens.length, 0);
  const calls = tree.nodes.filter((node) => node.kind === "tool").length;
  const ended = `${plural(tree.leaves.length, "trajectory")} ended`;
  return [ended, plural(branchPoints(tree), "branch point"), plural(calls, "tool call"), plural(sampled, "sampled token")].join(", ");
}

function branchPoints(tree) {
  return tree.nodes.filter((node) => node.decision?.branches > 0).length;
}

function drawHead(shown) {
  const { tree } = shown;
  const right = shorten(tree.task.answers.join(" or "), 160);
  put(
    board.head,
    el("h2", {}, `${shown.id}: ${printable(shorten(tree.task.question, 300))}`),
    el("p", {}, [right && `right answer: ${printable(right)}`, settingsText(shown.settings)].filter(Boolean).join(" · ")),
    el("p", {}, [stateText(shown), tree.nodes.length ? countsText(tree) : ""].filter(Boolean).join(" · ")),
    shown.state === "failed" && problem(shown.note),
    tree.leaves.length > 0 && answerList(tree),
  );
}

// The answers with how often each was given, the most frequent first.
function answerCounts(tree) {
  const counts = new Map();
  tree.leaves.forEach((leaf, number) => {
    const [answer, mark] = [leaf.answer ?? null, correctMark(tree.rewards[number])];
    const key = JSON.stringify([answer, mark]); // an answer may be right, and its format wrong
    const entry = counts.get(key) ?? { answer, mark, count: 0 };
    entry.count += 1;
    counts.set(key, entry);
  });
  return [...counts.values()].sort((a, b) => b.count - a.count);
}

function answerText({ answer, count, mark }, limit) {
  const words = answer === null ? "no answer" : printable(shorten(answer, limit)) || "(empty)";
  return `${mark}${mark && "\u00a0"}${words}${count > 1 ? `\u00a0×\u00a0${count}` : ""}`;
}

function answerList(tree) {
  const items = answerCounts(tree).map((entry) => el("li", { class: entry.answer === null ? "none" : null }, answerText(entry, 200)));
  return el("ul", { class: "answers", "aria-label": "Answers" }, ...items);
}

function drawHistory(mine, shown) {
  if (mine.length < 2) return clear(board.history);
  const rows = mine.toReversed().map((one) => {
    const { tree, settings } = one;
    const open = () => {
      board.shown = one.id;
      go({ node: null, leaf: null, chat: null }, { replace: true });
      update(readState());
    };
    const look = { type: "button", class: "link", "aria-current": one.id === shown.id ? "true" : null, click: open };
    const correct = tree.rewards.map((reward) => reward.parts?.correct).filter((value) => typeof value === "number");
    const beside = (on) => {
      board.beside[on ? "add" : "delete"](one.id);
      update(readState());
    };
    return [
      el("button", look, `${one.id}: ${printable(shorten(tree.task.question, 60))}`),
      number(settings.temperature),
      number(settings.num_trajectories),
      number(settings.num_initial),
      number(settings.tau),
      String(settings.seed),
      number(branchPoints(tree)),
      correct.length ? percent(mean(correct)) : "–",
      number(mean(tree.rewards.map((reward) => reward.total))),
      answerCounts(tree).slice(0, 3).map((entry) => answerText(entry, 30)).join(", "),
      one.id === shown.id ? "shown" : toggle("below", board.beside.has(one.id), beside, { "aria-label": `Show question ${one.id} below` }),
    ];
  });
  const heads = ["question", "temperature", "M", "N", "tau", "seed", "branch points", "correct", "reward", "answers", "compare"];
  board.history.replaceChildren(table(heads, rows, { class: "history" }));
}

function drawOthers(beside) {
  const parts = beside.map((one) => {
    const picture = el("div", { class: "picture other" });
    const open = (item) => {
      board.shown = one.id;
      go(item[0] === "l" ? { leaf: item.slice(1), node: null, chat: 1 } : { node: item.slice(1), leaf: null, chat: null }, { replace: true });
      update(readState());
    };
    const title = el("h3", {}, `${one.id}: ${printable(shorten(one.tree.task.question, 120))}`);
    const words = el("p", {}, `${settingsText(one.settings)} · ${countsText(one.tree)}`);
    const part = el("section", { class: "task" }, title, words, one.tree.leaves.length ? answerList(one.tree) : null, picture);
    return { part, draw: () => showPicture(picture, one.tree, { chosen: "n0", trajectory: null, open }) };
  });
  board.others.replaceChildren(...parts.map(({ part }) => part));
  for (const { draw } of parts) draw();
}
