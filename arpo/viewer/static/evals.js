// What `arpo eval` leaves: the numbers of evaluations, and every answer with its tree.

import { detailPanel } from "./detail.js";
import { choice, clear, el, number, plural, printable, problem, put, shorten, table, toggle } from "./dom.js";
import { withInterval } from "./heldout.js";
import { selection, showPicture } from "./picture.js";
import { api, exported, get } from "./source.js";
import { go, parseIndex } from "./state.js";

const RESET = { answer: null, node: null, leaf: null, chat: null };
const NONE = "There is no evaluation here. `arpo eval RUN` makes one: in evals/, or where --out says.";
const evalView = { node: null, request: 0, keys: {}, list: null, trees: new Map() };
const KEPT_TREES = 20;

export function evalTable(evals, runs, chosen) {
  const every = evals.flatMap((one) => one.sets.map((set) => [one, set]));
  const scored = every.some(([, set]) => differs(set));
  const rows = every.map(([one, set]) => [
    openButton(one, set, chosen && one.id === chosen.one.id && set.name === chosen.set.name),
    ...numbersOf(set, scored),
    agentOf(one, runs),
  ]);
  return table(["evaluation", ...numberHeads(scored), "agent"], rows, { class: "evals" });
}

function openButton(one, set, current) {
  const open = () => go({ tab: "evaluations", eval: one.id, set: set.name, kind: null, wrong: null, ...RESET });
  const name = printable(shorten(one.name, 60));
  const button = el("button", { type: "button", class: "link", "aria-current": current ? "true" : null, "data-eval": `${one.id} ${set.name}`, click: open }, `${name}: ${printable(shorten(set.title, 60))}`);
  const said = [one.live ? "in progress" : "", one.problem && !one.live ? printable(one.problem) : ""].filter(Boolean).join(", ");
  return el("span", {}, button, said ? el("small", {}, ` ${said}`) : null);
}

function agentOf(one, runs) {
  const run = runs.find((each) => each.id === one.run);
  if (!run) return printable(shorten(one.agent, 60)) || "–";
  return printable(shorten(run.name, 60)) + (one.step === null ? "" : `, step ${number(one.step)}`);
}

// Whether answers are scored by something else than being right or wrong.
function differs(set) {
  return typeof set.score?.value === "number" && set.score.value !== set.accuracy?.value;
}

function numberHeads(scored) {
  return ["accuracy (95 %)", ...(scored ? ["score (95 %)"] : []), "questions", "answers", "mean reward", "tool calls", "failed"];
}

function numbersOf(found, scored) {
  return [
    withInterval(found.accuracy),
    ...(scored ? [withInterval(found.score)] : []),
    number(found.questions),
    number(found.answers),
    number(found.reward?.value),
    number(found.calls),
    number(found.failed),
  ];
}

export async function evaluationsTab(main, state, evals, runs) {
  const request = ++evalView.request;
  if (evalView.node?.parentNode !== main) {
    makeEvalFrame();
    main.replaceChildren(evalView.node);
  }
  const one = evals.find((each) => each.id === state.eval) ?? evals[0];
  const set = one?.sets.find((each) => each.name === state.set) ?? one?.sets[0];
  if (!set) return evalView.node.replaceChildren(el("p", { class: "empty" }, NONE));
  put(evalView.node, evalView.head, evalView.kinds, evalView.columns);
  redrawPart("head", [evals, runs.map((run) => run.name), one.id, set.name], () => {
    const focused = document.activeElement?.dataset?.eval;
    put(evalView.head, el("h2", {}, "Evaluations"), evalTable(evals, runs, { one, set }));
    if (focused) [...evalView.head.querySelectorAll("[data-eval]")].find((each) => each.dataset.eval === focused)?.focus();
  });
  try {
    const { sets, coordinates } = await get(api("eval", { id: one.id }));
    const whole = sets.find((each) => each.name === set.name) ?? set;
    if (request !== evalView.request) return;
    redrawPart("kinds", [one.id, whole], () => drawKinds(one, whole));
    if (exported) return put(evalView.columns, el("p", { class: "note" }, "This exported page holds no answers of evaluations."));
    await drawAnswers(request, one, whole, state, { eval: one.id, coordinates: coordinates ?? undefined });
  } catch (error) {
    if (request === evalView.request) showProblem(error);
  }
}

function makeEvalFrame() {
  Object.assign(evalView, { keys: {}, list: null });
  for (const part of ["head", "kinds", "filters", "answers", "task", "detail"]) evalView[part] = el("div");
  evalView.task.className = "task";
  evalView.answers.className = "list";
  evalView.picture = el("div", { class: "picture" });
  const left = el("div", { class: "chooser" }, evalView.filters, evalView.answers);
  const right = el("div", { class: "one" }, evalView.task, evalView.picture, evalView.detail);
  evalView.columns = el("div", { class: "columns" }, left, right);
  evalView.node = el("div", { class: "evaluations" });
}

function redrawPart(part, key, draw) {
  const text = JSON.stringify(key);
  if (evalView.keys[part] === text) return;
  draw();
  evalView.keys[part] = text;
}

function showProblem(error) {
  for (const part of [evalView.task, evalView.detail]) clear(part);
  evalView.keys.one = null;
  evalView.picture.replaceChildren(problem(error));
}

function drawKinds(one, set) {
  const kinds = Object.entries(set.levels ?? {});
  const scored = differs(set) || kinds.some(([, found]) => differs(found));
  const rows = [...kinds.map(([kind, found]) => [printable(shorten(kind, 60)) || "–", ...numbersOf(found, scored)]), ["all", ...numbersOf(set, scored)]];
  put(
    evalView.kinds,
    el("h3", {}, `${printable(shorten(one.name, 60))}: ${printable(shorten(set.title, 60))}, by kind`),
    one.problem ? el("p", { class: "note" }, printable(one.problem)) : table(["kind of question", ...numberHeads(scored)], rows, { class: "evals" }),
  );
}

// --- answers, a page at a time

async function drawAnswers(request, one, set, state, origin) {
  const asked = { id: one.id, set: set.name, kind: state.kind, wrong: state.wrong === "1" ? 1 : undefined };
  const key = JSON.stringify(asked);
  if (evalView.list?.key !== key) evalView.list = { key, answers: [], next: 0, more: true, damaged: 0 };
  const list = evalView.list;
  if (list.next === 0 || (one.live && !list.more)) await readMore(list, asked);
  if (request !== evalView.request || list !== evalView.list) return;
  const kinds = Object.keys(set.levels ?? {});
  redrawPart("filters", [key, kinds], () => drawFilters(state, kinds));
  const at = parseIndex(state.answer) ?? list.answers[0]?.at;
  drawAnswerList(list, asked, at);
  if (at === undefined) return showProblem(new Error("No such answer."));
  const tree = await answerTree(one.id, set.name, at);
  if (request !== evalView.request) return;
  const { chosen, trajectory } = selection(tree, state, tree.leaves.length ? "l0" : "n0");
  redrawPart("one", [one.id, set.name, at, chosen, trajectory, state.shade], () => drawAnswer(tree, state, chosen, trajectory, origin));
}

async function readMore(list, asked) {
  const after = list.next;
  const page = await get(api("answers", { ...asked, after }));
  if (list.next !== after) return; // read meanwhile
  list.answers.push(...page.answers);
  Object.assign(list, { next: page.next, more: page.more, damaged: list.damaged + page.damaged });
}

function drawFilters(state, kinds) {
  const options = [["", "all kinds"], ...kinds.map((kind) => [kind, printable(shorten(kind, 60))])];
  put(
    evalView.filters,
    kinds.length ? choice("kind:", options, state.kind ?? "", (kind) => go({ kind: kind || null, ...RESET })) : null,
    toggle("not right", state.wrong === "1", (on) => go({ wrong: on ? 1 : null, ...RESET })),
  );
}

function drawAnswerList(list, asked, at) {
  redrawPart("answers", [list.key, list.next, list.more, at], () => {
    const focused = document.activeElement?.dataset?.n;
    const from = evalView.keys.answersOf === list.key ? evalView.answers.scrollTop : 0;
    evalView.keys.answersOf = list.key;
    const more = async () => {
      await readMore(list, asked);
      drawAnswerList(list, asked, at);
    };
    const damaged = list.damaged ? `; ${plural(list.damaged, "damaged one")} left out` : "";
    put(
      evalView.answers,
      el("p", { class: "count", role: "status" }, `${list.more ? "the first " : ""}${plural(list.answers.length, "answer")}${damaged}`),
      el("ul", { class: "prompts", "aria-label": "Answers" }, ...list.answers.map((each) => answerRow(each, each.at === at))),
      list.more ? el("button", { type: "button", click: more }, "more answers") : null,
    );
    evalView.answers.scrollTop = from;
    if (focused) evalView.answers.querySelector(`[data-n="${focused}"]`)?.focus();
  });
}

function answerRow(answer, chosen) {
  const open = () => go({ ...RESET, answer: answer.at });
  const mark = typeof answer.correct === "number" ? (answer.correct >= 1 ? "✓ right" : "✗ not right") : "";
  const kind = answer.kind && printable(shorten(answer.kind, 24));
  const said = [kind, mark, `reward ${number(answer.reward)}`];
  const tokens = answer.tokens === null ? "" : plural(answer.tokens, "token");
  const took = [`sample ${number((answer.number ?? 0) + 1)}`, plural(answer.calls, "call"), tokens, `ended by ${printable(shorten(answer.stop, 30))}`];
  return el(
    "li",
    {},
    el(
      "button",
      { type: "button", class: "asked", "aria-current": chosen ? "true" : null, "data-n": answer.at, click: open },
      el("span", { class: "question" }, printable(shorten(answer.question || answer.task, 160))),
      el("small", {}, said.filter(Boolean).join(" · ")),
      el("small", {}, took.filter(Boolean).join(" · ")),
      answer.failed === null ? null : el("small", { class: "fault" }, `does not count: ${printable(shorten(answer.failed, 200))}`),
    ),
  );
}

async function answerTree(id, set, at) {
  const path = api("answer", { id, set, at });
  if (!evalView.trees.has(path)) {
    evalView.trees.set(path, await get(path));
    if (evalView.trees.size > KEPT_TREES) evalView.trees.delete(evalView.trees.keys().next().value);
  }
  return evalView.trees.get(path);
}

function drawAnswer(tree, state, chosen, trajectory, origin) {
  const right = shorten(tree.task.answers.join(" or "), 160);
  const given = tree.leaves.map((leaf) => (typeof leaf.answer === "string" ? shorten(leaf.answer, 160) : "none")).join(", ");
  put(
    evalView.task,
    el("h2", {}, printable(shorten(tree.task.question, 300))),
    el("p", {}, `${right ? `right answer: ${printable(right)} · ` : ""}given: ${printable(given)}`),
  );
  const open = (item) => go(item[0] === "l" ? { leaf: item.slice(1), node: null, chat: 1 } : { node: item.slice(1), chat: null, leaf: trajectory });
  showPicture(evalView.picture, tree, { chosen, trajectory, open });
  evalView.detail.replaceChildren(detailPanel(tree, state, chosen, trajectory, origin));
}
