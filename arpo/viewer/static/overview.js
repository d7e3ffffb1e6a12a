// Curves of the chosen runs, one small chart a metric.

import { makeChart } from "./charts.js";
import { choice, el, number, percent, plural, printable, put, seconds, shorten, table, toggle } from "./dom.js";
import { evalTable } from "./evals.js";
import { heldOutTable } from "./heldout.js";
import { AXES, axisUnit, damagedOf, pointsOf, recordsOf, smoothed } from "./metrics.js";
import { go } from "./state.js";

const PANELS = [
  { title: "Reward", parts: [["reward", ""]] },
  { title: "Accuracy in training", parts: [["accuracy", ""]], share: true },
  { title: "Held-out accuracy", parts: [["test_accuracy", ""]], share: true, sparse: true },
  { title: "Tool calls", parts: [["tool_calls", ""]], floor: 0 },
  { title: "Branches", parts: [["branches", ""]], floor: 0 },
  {
    title: "Entropy (nats)",
    parts: [["entropy_start", "at the start"], ["entropy_after_tool", "after a tool"]],
    floor: 0,
  },
  { title: "Tokens", parts: [["unique_tokens", "unique"], ["total_tokens", "without sharing"]], floor: 0 },
  {
    title: "Seconds a step",
    parts: [["rollout_seconds", "sampling"], ["tool_seconds", "tools, all together"], ["train_seconds", "training"]],
    floor: 0,
    format: seconds,
  },
];
const SUPERVISED = [
  { title: "Loss", parts: [["loss", ""]] },
  { title: "Gradient norm", parts: [["grad_norm", ""]], floor: 0 },
];
const shownCharts = new Map();
const overviewFrame = { node: null };

export function overviewTab(main, state, runs, evals) {
  const chosen = runs.filter((run) => state.run.includes(run.id));
  if (overviewFrame.node?.parentNode !== main) {
    overviewFrame.bar = el("div", { class: "bar" });
    overviewFrame.summary = el("div");
    overviewFrame.evals = el("div");
    overviewFrame.evalsKey = "";
    overviewFrame.charts = el("div", { class: "charts" });
    overviewFrame.node = el("div", {}, overviewFrame.bar, overviewFrame.summary, overviewFrame.evals, overviewFrame.charts);
    main.replaceChildren(overviewFrame.node);
  }
  if (!chosen.length) {
    overviewFrame.summary.replaceChildren(el("p", { class: "empty" }, "Choose a run on the left."));
    overviewFrame.charts.replaceChildren();
    drawEvals([], []);
    return;
  }
  drawBar(state, chosen);
  overviewFrame.summary.replaceChildren(summary(chosen));
  drawEvals(evals.filter((one) => chosen.some((run) => run.id === one.run)), chosen);
  drawCharts(state, chosen);
}

// The evaluations of the chosen runs by `arpo eval`; drawn again only if they changed, so that focus stays.
function drawEvals(evals, chosen) {
  const key = JSON.stringify([evals, chosen.map((run) => run.name)]);
  if (overviewFrame.evalsKey === key) return;
  overviewFrame.evalsKey = key;
  put(overviewFrame.evals, ...(evals.length ? [el("h2", {}, "Evaluations"), evalTable(evals, chosen)] : []));
}

function drawBar(state, chosen) {
  const others = otherNames(chosen);
  const key = JSON.stringify([state.x, state.smooth, state.more, others]);
  if (overviewFrame.key === key && overviewFrame.bar.firstChild) return;
  overviewFrame.key = key;
  const add = (name) => name && go({ more: [...state.more, name] });
  const options = others.filter((name) => !state.more.includes(name)).map((name) => [name, printable(name)]);
  put(
    overviewFrame.bar,
    choice("x:", AXES, state.x ?? "step", (x) => go({ x: x === "step" ? null : x })),
    toggle("smooth", state.smooth === "1", (on) => go({ smooth: on ? 1 : null })),
    choice("add a curve:", [["", "…"], ...options], "", add),
    state.more.length ? el("button", { type: "button", click: () => go({ more: [] }) }, "remove added") : null,
  );
}

function otherNames(chosen) {
  const usual = new Set(["step", ...PANELS.flatMap((panel) => panel.parts.map(([name]) => name))]);
  const names = new Set();
  for (const run of chosen) {
    for (const record of recordsOf(run.id)) for (const name in record) if (typeof record[name] === "number") names.add(name);
  }
  return [...names].filter((name) => !usual.has(name)).sort();
}

function summary(chosen) {
  const rows = chosen.map((run) => {
    const records = recordsOf(run.id);
    const last = records.at(-1) ?? {};
    const tested = records.findLast((record) => typeof record.test_accuracy === "number");
    const total = records.reduce((sum, one) => sum + (one.rollout_seconds ?? 0) + (one.train_seconds ?? 0), 0);
    const name = el("span", {}, printable(shorten(run.name, 60)));
    return [
      name,
      printable(shorten(String(run.preset ?? "–"), 30)),
      printable(shorten(String(run.model ?? "–"), 40)),
      number(last.step ?? run.steps),
      number(last.reward),
      percent(last.accuracy),
      percent(last.format),
      percent(tested?.test_accuracy, 1),
      seconds(total),
    ];
  });
  const heads = ["run", "preset", "model", "steps", "reward", "accuracy", "format", "held-out", "time"];
  const damaged = chosen.filter((run) => damagedOf(run.id) > 0);
  const notes = damaged.map((run) =>
    el("p", { class: "note" }, `${printable(shorten(run.name, 60))}: ${plural(damagedOf(run.id), "damaged record")} left out`),
  );
  return el("div", {}, table(heads, rows, { class: "summary" }), ...notes, ...chosen.flatMap(formatNote), ...collapseWarnings(chosen), ...chosen.flatMap(heldOutTable));
}

// Why formats were wrong in a run's last step, the commonest reason first: the metrics `format.REASON` are counts.
function formatNote(run) {
  const last = recordsOf(run.id).at(-1) ?? {};
  const counted = Object.entries(last).filter(([name, count]) => name.startsWith("format.") && typeof count === "number" && count > 0);
  if (!counted.length) return [];
  const said = counted
    .sort((one, other) => other[1] - one[1])
    .map(([name, count]) => `${printable(shorten(name.slice("format.".length).replaceAll("_", " "), 60))} (${number(count)})`);
  const where = `${printable(shorten(run.name, 60))}, step ${number(last.step)}`;
  return [el("p", { class: "note formats" }, `${where}: wrong formats, of ${plural(last.trajectories, "trajectory")}: ${said.join(", ")}`)];
}

// The warnings of the collapse monitor.
function collapseWarnings(chosen) {
  const found = chosen.flatMap((run) =>
    recordsOf(run.id)
      .filter((record) => typeof record.collapse_warnings === "string" && record.collapse_warnings)
      .map((record) => `${run.name}, step ${record.step}: ${record.collapse_warnings}`),
  );
  if (!found.length) return [];
  const lines = found.slice(-50).map((line) => el("li", {}, printable(shorten(line, 400))));
  return [el("details", { class: "warnings" }, el("summary", {}, plural(found.length, "collapse warning")), el("ul", {}, ...lines))];
}

function panelsFor(chosen, state) {
  const trained = chosen.some((run) => run.kind !== "sft");
  const added = state.more.map((name) => ({ title: printable(shorten(name, 60)), parts: [[name, ""]], sparse: true }));
  return [...(trained ? PANELS : SUPERVISED), ...added];
}

function drawCharts(state, chosen) {
  const axis = AXES.some(([key]) => key === state.x) ? state.x : "step";
  const unit = axisUnit(axis, chosen.map((run) => recordsOf(run.id)));
  const panels = panelsFor(chosen, state);
  const charts = panels.map((panel) => {
    const key = JSON.stringify(panel.parts);
    if (!shownCharts.has(key)) {
      const format = panel.share ? percent : (panel.format ?? number);
      shownCharts.set(key, makeChart({ title: panel.title, format, floor: panel.share ? 0 : panel.floor ?? null }));
    }
    return shownCharts.get(key);
  });
  const nodes = charts.map((chart) => chart.node);
  const there = [...overviewFrame.charts.children];
  if (nodes.length !== there.length || nodes.some((node, place) => node !== there[place])) {
    overviewFrame.charts.replaceChildren(...nodes);
  }
  panels.forEach((panel, place) => {
    const series = chosen.flatMap((run) => seriesOf(run, panel, axis, unit, state.smooth === "1"));
    const xFormat = axis === "time" ? (x) => number(Math.round(100 * x) / 100, 4) : (x) => number(Math.round(x));
    charts[place].update(series, { xLabel: unit.label, xFormat, wholeX: axis !== "time" });
  });
}

function seriesOf(run, panel, axis, unit, smooth) {
  return panel.parts.flatMap(([name, words], dash) => {
    const every = pointsOf(recordsOf(run.id), name, axis, unit.factor);
    const raw = panel.sparse ? every.filter(([, y]) => y !== null) : every;
    const label = printable(shorten(run.name, 30)) + (words ? ` ${words}` : "");
    const look = { name: label, color: run.place, mark: run.place, dash, legend: words, dots: panel.sparse };
    if (!smooth || raw.length < 5) return [{ ...look, points: raw }];
    return [{ ...look, name: `${label}, raw`, points: raw, faint: true, legend: "" }, { ...look, points: smoothed(raw) }];
  });
}
