// The results of `arpo compare`.

import { badge, makeChart } from "./charts.js";
import { choice, clear, el, number, percent, printable, problem, shorten, table } from "./dom.js";
import { api, get } from "./source.js";
import { go } from "./state.js";

const COSTS = [
  ["tool_calls", "tool calls"],
  ["seconds", "minutes"],
  ["tokens", "tokens"],
  ["trajectories", "trajectories"],
  ["step", "steps"],
];
const compareView = { request: 0 };

export async function compareTab(main, state, comparisons) {
  const request = ++compareView.request;
  if (compareView.node?.parentNode !== main) {
    compareView.node = el("div", { class: "compare" });
    compareView.key = "";
    main.replaceChildren(compareView.node);
  }
  const chosen = comparisons.find((one) => one.id === state.cmp) ?? comparisons[0];
  if (!chosen) {
    clear(compareView.node).append(el("p", { class: "empty" }, "There is no comparison here. `arpo compare` makes one; to compare curves, choose several runs in Overview."));
    return;
  }
  try {
    const found = await get(api("comparison", { id: chosen.id }));
    const key = JSON.stringify([found, state.cost, comparisons.length]);
    if (request !== compareView.request || key === compareView.key) return;
    compareView.key = key;
    drawComparison(compareView.node, found, chosen, comparisons, state);
  } catch (error) {
    if (request === compareView.request) clear(compareView.node).append(problem(error));
  }
}

function drawComparison(node, found, chosen, comparisons, state) {
  const cost = COSTS.find(([key]) => key === state.cost) ?? COSTS[0];
  const options = comparisons.map((one) => [one.id, printable(shorten(one.title || one.id, 60))]);
  const chart = makeChart({ title: "Held-out accuracy: mean over seeds, thin lines single seeds", format: percent });
  clear(node).append(
    el(
      "div",
      { class: "bar" },
      comparisons.length > 1 ? choice("comparison:", options, chosen.id, (cmp) => go({ cmp })) : null,
      choice("x:", COSTS, cost[0], (key) => go({ cost: key === COSTS[0][0] ? null : key })),
    ),
    el("h2", {}, printable(shorten(found.title ?? "", 200))),
  );
  if (!found.complete) {
    const lines = (found.missing ?? []).map((lack) => el("li", {}, printable(shorten(`${lack.algorithm}, seed ${lack.seed}: ${lack.why}`, 300))));
    node.append(el("div", { class: "problem" }, "Partial: these runs are missing.", el("ul", {}, ...lines)));
  }
  node.append(resultTable(found), el("div", { class: "charts single" }, chart.node), ...(found.reading ?? []).map((line) => el("p", { class: "note" }, printable(line))));
  chart.update(curvesOf(found, cost[0]), { xLabel: cost[1], xFormat: (x) => number(x, 3) });
}

function span(mean) {
  if (!mean) return "–";
  const ends = typeof mean.low === "number" ? ` (${(100 * mean.low).toFixed(1)} to ${(100 * mean.high).toFixed(1)})` : "";
  return percent(mean.mean, 1) + ends;
}

function points(mean) {
  if (!mean) return "–";
  const show = (value) => `${value > 0 ? "+" : ""}${(100 * value).toFixed(1)}`.replace("-", "−");
  return show(mean.mean) + (typeof mean.low === "number" ? ` (${show(mean.low)} to ${show(mean.high)})` : "");
}

// Tool calls to a level of accuracy over those of the baseline; * holds after Holm's correction.
function ratio(entry) {
  if (!entry) return "–";
  const both = entry.by_seed?.length ?? 0;
  if (!entry.ratio) return `reached in ${number(entry.reached)} of ${number(entry.seeds?.length ?? 0)}`;
  const { mean, low, high } = entry.ratio;
  const ends = typeof low === "number" ? ` (${number(low)} to ${number(high)})` : "";
  const some = both < (entry.seeds?.length ?? 0) ? `, ${both} of ${entry.seeds.length} seeds` : "";
  const holds = typeof entry.holm_p === "number" && entry.holm_p <= 0.05 ? " *" : "";
  return number(mean) + ends + some + holds;
}

// The levels that the comparison has ratios for: shares of the baseline's gain, or given accuracies.
function levelsOf(found) {
  const levels = new Map();
  for (const one of found.cost_ratios ?? []) {
    if (one.cost === "tool_calls") levels.set(one.level.accuracy, one.level);
  }
  return [...levels.values()];
}

function resultTable(found) {
  const levels = levelsOf(found);
  const ratioOf = (row, level) =>
    ratio((found.cost_ratios ?? []).find((one) => one.cost === "tool_calls" && one.algorithm === row.algorithm && one.level.accuracy === level.accuracy));
  const rows = found.results.map((row) => {
    const place = found.algorithms.indexOf(row.algorithm);
    const base = row.algorithm === found.baseline ? " (baseline)" : "";
    return [
      el("span", { class: "named" }, badge(place), ` ${printable(shorten(row.algorithm, 40))}${base}`),
      number(row.seeds),
      span(row.accuracy),
      points(row.difference?.mean),
      row.difference ? `${row.difference.better}, ${row.difference.worse}` : "–",
      ...levels.map((level) => ratioOf(row, level)),
      number(row.tool_calls),
      typeof row.seconds === "number" ? number(row.seconds / 60) : "–",
    ];
  });
  const heads = [
    "algorithm", "seeds", "accuracy (95 %)", "difference, points", "better, worse",
    ...levels.map((level) => `calls to ${percent(level.accuracy, 1)}, ratio`),
    "tool calls", "minutes",
  ];
  return table(heads, rows);
}

function at(curve, x) {
  const after = curve.findIndex(([place]) => place >= x);
  if (after < 0) return null;
  const [x1, y1] = curve[after];
  if (x1 === x || after === 0) return y1;
  const [x0, y0] = curve[after - 1];
  return y0 + ((y1 - y0) * (x - x0)) / (x1 - x0);
}

// A mean over seeds goes as far as the shortest of them; between tests accuracy is interpolated.
function meanCurve(curves) {
  const grid = [...new Set(curves.flatMap((curve) => curve.map(([x]) => x)))].sort((a, b) => a - b);
  const end = Math.min(...curves.map((curve) => curve.at(-1)[0]));
  return grid.filter((x) => x <= end).map((x) => [x, curves.reduce((sum, curve) => sum + at(curve, x), 0) / curves.length]);
}

function curvesOf(found, cost) {
  const unit = cost === "seconds" ? 60 : 1;
  return found.algorithms.flatMap((algorithm, place) => {
    const trials = found.trials.filter((trial) => trial.algorithm === algorithm && !trial.problem && trial.curve.length);
    const curves = trials.map((trial) => [...new Map(trial.curve.map((point) => [point[cost] / unit, point.accuracy]))]);
    if (!curves.length) return [];
    const name = printable(shorten(algorithm, 40));
    const look = { color: place, mark: place };
    const single = curves.length > 1 ? curves.map((curve) => ({ ...look, name, points: curve, faint: true })) : [];
    return [...single, { ...look, name, legend: name, own: true, dash: place % 4, points: meanCurve(curves), dots: true }];
  });
}
