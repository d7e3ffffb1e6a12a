// Step, prompt, tree: the rollouts of a run.

import { clear, el, mean, number, plural, printable, problem, put, shorten } from "./dom.js";
import { detailPanel } from "./detail.js";
import { accuracyText, selection, showPicture } from "./picture.js";
import { filterBar, filtered, hitList, promptList } from "./prompts.js";
import { api, exported, get } from "./source.js";
import { go, parseIndex } from "./state.js";

const treeView = { node: null, cache: new Map(), request: 0 };
const CACHE_SIZE = 30;

// Fetched trees and prompts. Those of a step only change when a run is rolled back and resumed.
async function fetched(path) {
  if (!treeView.cache.has(path)) {
    const value = await get(path);
    treeView.cache.set(path, value);
    if (treeView.cache.size > CACHE_SIZE) treeView.cache.delete(treeView.cache.keys().next().value);
  }
  return treeView.cache.get(path);
}

export function clearTreeCache() {
  treeView.cache.clear();
  treeView.keys = {};
}

export async function treesTab(main, state, run) {
  const request = ++treeView.request;
  if (treeView.node?.parentNode !== main) {
    makeFrame();
    main.replaceChildren(treeView.node);
  }
  try {
    const { steps } = await get(api("steps", { run: run.id }));
    if (request !== treeView.request) return;
    if (!steps.length) {
      const none = run.kind === "sft" ? "Supervised fine-tuning samples no trees." : "This run has no trees yet.";
      message(el("p", { class: "empty" }, none));
      return;
    }
    const wanted = parseIndex(state.step);
    const step = steps.includes(wanted) ? wanted : steps.at(-1);
    drawSteps(steps, step, run, wanted !== null);
    const { trees } = await fetched(api("prompts", { run: run.id, step }));
    if (request !== treeView.request) return;
    const shown = filtered(trees, state.only);
    const n = trees.some((tree) => tree.n === parseIndex(state.n)) ? parseIndex(state.n) : (shown[0] ?? trees[0])?.n;
    await Promise.all([drawList(request, run, step, trees, state, n), drawOne(request, run, step, n, state)]);
  } catch (error) {
    if (request === treeView.request) message(problem(error));
  }
}

function makeFrame() {
  const search = el("input", { type: "search", id: "search", placeholder: "search in this step ( / )", "aria-label": "Search in the texts of this step" });
  search.addEventListener("change", () => go({ q: search.value || null }));
  treeView.search = search;
  treeView.steps = el("div", { class: "bar steps" });
  treeView.list = el("div", { class: "list" });
  treeView.picture = el("div", { class: "picture" });
  treeView.head = el("div", { class: "task" });
  treeView.detail = el("div");
  treeView.filters = el("div");
  const right = el("div", { class: "one" }, treeView.head, treeView.picture, treeView.detail);
  const left = el("div", { class: "chooser" }, treeView.filters, search, treeView.list);
  treeView.node = el("div", { class: "trees" }, treeView.steps, el("div", { class: "columns" }, left, right));
  treeView.keys = {};
}

function message(node) {
  for (const part of [treeView.steps, treeView.filters, treeView.list, treeView.head, treeView.detail]) clear(part);
  treeView.picture.replaceChildren(node);
  treeView.keys = {};
}

// Redraws a part only if what it shows has changed, so that nothing flickers and focus stays.
function redrawIfChanged(part, key, draw) {
  const text = JSON.stringify(key);
  if (treeView.keys[part] === text) return;
  treeView.keys[part] = text;
  draw();
}

function drawSteps(steps, step, run, pinned) {
  redrawIfChanged("steps", [run.id, steps.length, steps.at(-1), step, pinned], () => {
    const place = steps.indexOf(step);
    const to = (index) => go({ step: steps[Math.max(0, Math.min(steps.length - 1, index))], n: null, node: null, leaf: null, chat: null });
    const focused = document.activeElement?.dataset?.control;
    const shown = el("output", { class: "step" }, `${number(step)}`);
    const slider = el("input", { type: "range", min: 0, max: steps.length - 1, value: place, "aria-label": "Step", "data-control": "slider" });
    slider.setAttribute("aria-valuetext", `step ${step}`);
    slider.addEventListener("input", () => (shown.textContent = number(steps[Number(slider.value)])));
    slider.addEventListener("change", () => to(Number(slider.value)));
    const move = (label, by, text) =>
      el("button", { type: "button", "aria-label": label, title: label, "data-control": label, click: () => to(place + by) }, text);
    put(
      treeView.steps,
      el("span", {}, "step "),
      shown,
      move("Step before", -1, "◀"),
      slider,
      move("Step after", 1, "▶"),
      el("small", {}, `${plural(steps.length, "step")} with trees`),
      pinned && el("button", { type: "button", click: () => go({ step: null, n: null, node: null, leaf: null }) }, "latest"),
    );
    if (focused) treeView.steps.querySelector(`[data-control="${focused}"]`)?.focus();
  });
}

async function drawList(request, run, step, trees, state, n) {
  if (document.activeElement !== treeView.search) treeView.search.value = state.q ?? "";
  redrawIfChanged("filters", [state.only], () => treeView.filters.replaceChildren(filterBar(state)));
  const key = [run.id, step, trees.length, state.only, state.q, n];
  if (treeView.keys.list === JSON.stringify(key)) return;
  const list = state.q ? await hitList(run.id, step, trees, state.q) : promptList(trees, state, n);
  if (request !== treeView.request) return;
  redrawIfChanged("list", key, () => {
    const focused = document.activeElement?.dataset?.n;
    const from = treeView.list.scrollTop;
    treeView.list.replaceChildren(list);
    treeView.list.scrollTop = from;
    if (focused) treeView.list.querySelector(`[data-n="${focused}"]`)?.focus();
  });
}

function noTree(said) {
  treeView.keys.one = null;
  clear(treeView.head);
  clear(treeView.detail);
  treeView.picture.replaceChildren(said);
}

async function drawOne(request, run, step, n, state) {
  if (n === undefined) return noTree(el("p", { class: "empty" }, "This step has no trees."));
  let tree;
  try {
    tree = await fetched(api("tree", { run: run.id, step, n }));
  } catch (error) {
    if (request === treeView.request) noTree(problem(error));
    return;
  }
  const origin = { run: run.id, coordinates: await coordinatesOf(run.id) };
  if (request !== treeView.request) return;
  const { chosen, trajectory } = selection(tree, state);
  redrawIfChanged("one", [run.id, step, n, chosen, trajectory, state.shade], () => drawTreeAndDetail(tree, state, chosen, trajectory, step, n, origin));
}

// How calls of this run write the boxes of a crop; undefined if its settings do not say.
export async function coordinatesOf(run) {
  try {
    const { environment } = (await fetched(api("config", { run }))).config;
    return environment?.name === "images" ? (environment.settings?.coordinates ?? "fraction") : undefined;
  } catch {
    return undefined;
  }
}

function drawTreeAndDetail(tree, state, chosen, trajectory, step, n, origin) {
  const correct = tree.rewards.map((reward) => reward.parts?.correct);
  const accuracy = correct.every((value) => typeof value === "number") ? mean(correct) : null;
  const answers = shorten(tree.task.answers.join(" or "), 160);
  const again = () => go({ tab: "playground", step, n, node: null, leaf: null, chat: null });
  treeView.head.replaceChildren(
    el("h2", {}, printable(shorten(tree.task.question, 300))),
    el("p", {}, `${answers ? `right answer: ${printable(answers)} · ` : ""}step ${step}, prompt #${n} · ${plural(tree.leaves.length, "trajectory")}${accuracyText(accuracy)}`, exported ? null : el("button", { type: "button", class: "link", click: again }, "ask again")),
  );
  const open = (item) => go(item[0] === "l" ? { leaf: item.slice(1), node: null, chat: 1 } : { node: item.slice(1), chat: null, leaf: trajectory });
  showPicture(treeView.picture, tree, { chosen, trajectory, open });
  treeView.detail.replaceChildren(detailPanel(tree, state, chosen, trajectory, origin));
}
