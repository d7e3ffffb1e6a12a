// The page: its tabs, polling of live runs, keyboard shortcuts.

import { compareTab } from "./compare.js";
import { configTab } from "./config.js";
import { clear, el, plural, printable, problem } from "./dom.js";
import { entropyTab } from "./entropy.js";
import { evaluationsTab } from "./evals.js";
import { loadEvaluations } from "./heldout.js";
import { loadMetrics } from "./metrics.js";
import { overviewTab } from "./overview.js";
import { playgroundTab } from "./playground.js";
import { runList } from "./runs.js";
import { api, exported, get } from "./source.js";
import { go, readState } from "./state.js";
import { clearTreeCache, treesTab } from "./trees.js";

const TABS = ["Overview", "Trees", "Entropy", "Compare", "Evaluations", "Config", ...(exported ? [] : ["Playground"])];
const POLL = 2000;
const IDLE = 6000; // when nothing is being written
const OVERLAID = 6;
const page = { runs: [], comparisons: [], evals: [], loaded: false };

function byId(id) {
  return document.getElementById(id);
}

function currentRun(state) {
  const by = (id) => page.runs.find((run) => run.id === id);
  return by(state.at) ?? by(state.run.find((id) => by(id))) ?? page.runs[0];
}

// Defaults of the address: all runs if they are few, else the newest.
function withDefaults(state) {
  if (state.run.length) return state;
  const newest = page.runs.toSorted((a, b) => String(b.started).localeCompare(String(a.started)))[0];
  const chosen = page.runs.length <= OVERLAID ? page.runs.map((run) => run.id) : [newest.id];
  return { ...state, run: chosen, at: state.at ?? newest?.id };
}

function tabOf(state) {
  const only = page.comparisons.length ? "Compare" : page.evals.length ? "Evaluations" : "Overview";
  return TABS.find((tab) => tab.toLowerCase() === state.tab) ?? (page.runs.length ? "Overview" : only);
}

function drawTabs(state) {
  const now = tabOf(state);
  if (byId("tabs").dataset.now === now) return;
  byId("tabs").dataset.now = now;
  const focused = byId("tabs").contains(document.activeElement);
  const tabs = TABS.map((tab) => {
    const on = tab === now;
    const look = { role: "tab", type: "button", id: `tab-${tab}`, "aria-selected": String(on), tabindex: on ? "0" : "-1" };
    return el("button", { ...look, "aria-controls": "main", click: () => go({ tab: tab.toLowerCase() }) }, tab);
  });
  byId("tabs").replaceChildren(...tabs);
  byId("main").setAttribute("aria-labelledby", `tab-${now}`);
  if (focused) byId(`tab-${now}`).focus();
}

async function draw() {
  if (!page.loaded) return;
  const state = withDefaults(readState());
  const run = currentRun(state);
  const tab = tabOf(state);
  drawTabs(state);
  runList(byId("runs"), page.runs, state, run);
  const main = byId("main");
  if (tab === "Compare") return compareTab(main, state, page.comparisons);
  if (tab === "Evaluations") return evaluationsTab(main, state, page.evals, page.runs);
  if (!run) return main.replaceChildren(el("p", { class: "empty" }, "No runs here yet. `arpo train` and `arpo demo` make them."));
  if (tab === "Overview") {
    await loadSelected(state, false);
    if (tabOf(readState()) === tab) overviewTab(main, withDefaults(readState()), page.runs, page.evals);
  } else if (tab === "Trees") await treesTab(main, state, run);
  else if (tab === "Playground") await playgroundTab(main, state, run);
  else if (tab === "Entropy") await entropyTab(main, state, run);
  else await configTab(main, state, run, page.runs);
}

const fetchedOnce = new Set();

async function loadSelected(state, liveOnly) {
  const wanted = page.runs.filter((run) => state.run.includes(run.id) && (run.live || run.grew || !fetchedOnce.has(run.id)));
  const results = await Promise.allSettled(
    wanted.filter((run) => !liveOnly || run.live || run.grew).map(async (run) => {
      await Promise.all([loadMetrics(run.id), loadEvaluations(run.id)]);
      fetchedOnce.add(run.id);
      run.grew = false;
    }),
  );
  const failed = results.find((result) => result.status === "rejected");
  banner(failed ? failed.reason : null);
}

async function loadRuns() {
  const found = await get(api("runs"));
  const before = new Map(page.runs.map((run) => [run.id, run]));
  const order = [...before.keys()];
  for (const run of found.runs) if (!before.has(run.id)) order.push(run.id);
  for (const run of found.runs) {
    const old = before.get(run.id);
    run.place = order.indexOf(run.id);
    run.grew = Boolean(old) && (old.grew || old.live || old.steps !== run.steps);
    if (old && run.steps < old.steps) clearTreeCache();
  }
  Object.assign(page, { runs: found.runs, comparisons: found.comparisons ?? [], evals: found.evals ?? [], loaded: true });
  byId("root").textContent = printable(found.root ?? "");
  document.title = `arpo view ${printable(found.root ?? "")}`;
  byId("note").hidden = !found.note;
  byId("note").textContent = printable(found.note ?? "");
}

function banner(error) {
  const box = byId("banner");
  const text = error ? printable(error.message ?? String(error)) : "";
  if (box.textContent === text) return;
  box.hidden = !text;
  box.textContent = text;
}

async function poll() {
  try {
    if (!document.hidden) {
      await loadRuns();
      banner(null);
      await draw();
    }
  } catch (error) {
    banner(error);
  }
  setTimeout(poll, page.runs.some((run) => run.live) ? POLL : IDLE);
}

const KEYS = [
  ["← → ↑ ↓", "in a tree: to the parent, a child, the node above or below"],
  ["Enter", "open the node, or read the selected trajectory"],
  ["Home", "in a tree: to the prompt"],
  ["/", "search in the texts of the step"],
  ["[ and ]", "the step before, the step after"],
  ["j and k", "the next prompt, the one before"],
  [`1 to ${TABS.length}`, plural(TABS.length, "view") + ": " + TABS.join(", ")],
  ["?", "this list"],
];

function showHelp() {
  const rows = KEYS.flatMap(([key, words]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, words)]);
  const close = el("button", { type: "button", click: () => byId("help").close() }, "Close");
  clear(byId("help")).append(el("h2", { id: "help-title" }, "Keys"), el("dl", { class: "keys" }, ...rows), close);
  byId("help").showModal();
}

function nextPrompt(by) {
  const rows = [...document.querySelectorAll(".prompts .asked[data-n]")];
  const at = rows.findIndex((row) => row.getAttribute("aria-current"));
  rows[Math.max(0, Math.min(rows.length - 1, at + by))]?.click();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest?.("input:not([type=checkbox]):not([type=range]), select, textarea")) return;
  const acts = {
    "?": showHelp,
    "/": () => byId("search") ? byId("search").focus() : go({ tab: "trees" }),
    "[": () => document.querySelector('[data-control="Step before"]')?.click(),
    "]": () => document.querySelector('[data-control="Step after"]')?.click(),
    j: () => nextPrompt(1),
    k: () => nextPrompt(-1),
  };
  const act = acts[event.key] ?? (TABS[Number(event.key) - 1] && (() => go({ tab: TABS[Number(event.key) - 1].toLowerCase() })));
  if (!act) return;
  event.preventDefault();
  act();
}

function tabKeys(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const at = TABS.findIndex((tab) => event.target.id === `tab-${tab}`);
  if (!step || at < 0) return;
  event.preventDefault();
  go({ tab: TABS[(at + step + TABS.length) % TABS.length].toLowerCase() });
}

async function start() {
  byId("keys").addEventListener("click", showHelp);
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault();
    byId("main").focus();
  });
  byId("tabs").addEventListener("keydown", tabKeys);
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", () => draw().catch(banner));
  window.addEventListener("unhandledrejection", (event) => banner(event.reason));
  window.addEventListener("error", (event) => banner(event.error ?? event.message));
  if (matchMedia("(max-width: 760px)").matches) byId("side").open = false;
  try {
    await loadRuns();
    await draw();
  } catch (error) {
    byId("main").replaceChildren(problem(error));
  }
  if (!exported) setTimeout(poll, POLL);
}

start();
