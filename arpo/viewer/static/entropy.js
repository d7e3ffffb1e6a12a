// The entropy study of this run's trees.

import { makeChart } from "./charts.js";
import { clear, el, number, percent, printable, problem, shorten, signed, svg, table } from "./dom.js";
import { api, get } from "./source.js";
import { go } from "./state.js";

const entropyView = { request: 0, key: "" };

export async function entropyTab(main, state, run) {
  const key = JSON.stringify([run.id, state.steps, run.steps]);
  if (entropyView.node?.parentNode === main && entropyView.key === key) return;
  const request = ++entropyView.request;
  const fresh = entropyView.node?.parentNode !== main;
  if (fresh) {
    entropyView.node = el("div", { class: "entropy" }, el("p", { class: "empty", role: "status" }, "Looking at the trees…"));
    main.replaceChildren(entropyView.node);
  }
  entropyView.key = key;
  try {
    const found = await get(api("entropy", { run: run.id, steps: state.steps }));
    if (request === entropyView.request) drawStudy(entropyView.node, found, state, run);
  } catch (error) {
    if (request === entropyView.request) clear(entropyView.node).append(stepsForm(state), problem(error));
  }
}

function stepsForm(state) {
  const input = el("input", { type: "text", size: 12, value: state.steps ?? "", placeholder: "the last 5", "aria-label": "Steps, such as 10-20" });
  const send = (event) => {
    event.preventDefault();
    go({ steps: input.value.trim() || null });
  };
  return el("form", { class: "bar", submit: send }, el("label", {}, "steps ", input), el("button", { type: "submit" }, "show"));
}

function label(entry) {
  return printable(shorten(entry.label, 40));
}

function interval(mean, show) {
  if (!mean) return "–";
  const reach = typeof mean.error === "number" ? ` ± ${number(1.96 * mean.error, 2)}` : "";
  return show(mean.value) + reach;
}

// The largest entropy of a kind of turn, without tokens that less than a tenth of its turns have.
function usualHigh(entry) {
  const counts = entry.positions.map((mean) => mean.count);
  return Math.max(0, ...entry.positions.filter((mean) => mean.count >= 0.1 * Math.max(...counts)).map((mean) => mean.value));
}

function drawStudy(node, found, state, run) {
  const curves = makeChart({ title: "Entropy token by token, by start of the turn (nats; bands: 95 %)", xLabel: "token", floor: 0 });
  const series = found.turn_starts.map((entry, index) => ({
    name: label(entry),
    legend: label(entry),
    own: true,
    color: index,
    mark: index,
    dash: index % 4,
    weight: entry.turns,
    high: usualHigh(entry),
    points: entry.positions.map((mean, position) => [position + 1, mean.value]),
    band: entry.positions
      .map((mean, position) => [position + 1, mean.value - 1.96 * mean.error, mean.value + 1.96 * mean.error, mean.error])
      .filter(([, , , error]) => typeof error === "number"),
  }));
  const said = `${number(found.tree_count)} trees of ${number(found.questions)} questions; ${printable(shorten(found.trees, 100))}; temperature ${number(found.temperature)}`;
  clear(node).append(
    stepsForm(state),
    el("h2", {}, `Entropy by start of the turn: ${printable(shorten(run.name, 60))}`),
    el("p", {}, said),
    ...(found.findings ?? []).map((line) => el("p", {}, printable(shorten(line, 300)))),
    entropyTable(found),
    el("div", { class: "charts wide" }, curves.node, ...found.decisions_by_tool.map((entry) => histogram(entry, found))),
    el("h3", {}, "Branching decisions"),
    decisionTable("result of", found.decisions_by_tool, label),
    decisionTable("call in the trajectory", found.decisions_by_call, (entry) => number(entry.call)),
  );
  curves.update(series, { wholeX: true });
}

function entropyTable(found) {
  const decisions = new Map(found.decisions_by_tool.map((entry) => [entry.label, entry]));
  const rows = found.turn_starts.map((entry) => {
    const stats = decisions.get(entry.label);
    return [
      label(entry),
      number(entry.first_tokens.count),
      number(entry.turns),
      interval(entry.first_tokens, number),
      stats ? interval(stats.rise, signed) : "",
      stats?.risen ? percent(stats.risen.value) : "",
      stats ? number(stats.branched) : "",
    ];
  });
  const heads = ["start of the turn", "count", "turns", `H, first ${found.probe_tokens} tokens`, "H − H at the start", "dH > 0", "branched"];
  return table(heads, rows);
}

function decisionTable(head, entries, name) {
  const rows = entries.map((entry) => [
    name(entry),
    number(entry.decisions),
    entry.risen ? percent(entry.risen.value) : "–",
    number(entry.branched),
    Object.entries(entry.not_branched).map(([reason, count]) => `${printable(shorten(reason, 60))}: ${number(count)}`).join("; "),
    number(entry.compared),
    entry.compared ? percent(entry.informative / entry.compared) : "",
    entry.auc === null ? "" : entry.auc.toFixed(2),
  ]);
  return table([head, "decisions", "dH > 0", "branched", "not branched because", "compared", "informative", "AUC of dH"], rows, { class: "decisions" });
}

// A stacked histogram of dH: results that were branched from below, the others above.
function histogram(entry, found) {
  const [width, height, foot] = [380, 150, 22];
  const both = entry.branched_histogram.map((count, place) => count + entry.other_histogram[place]);
  const most = Math.max(1, ...both);
  const [low, high] = [found.bins[0], found.bins.at(-1)];
  const px = (value) => 8 + ((value - low) / (high - low || 1)) * (width - 16);
  const py = (count) => 8 + (1 - count / most) * (height - foot - 8);
  const parts = both.flatMap((count, place) => {
    const [x, size] = [px(found.bins[place]), px(found.bins[place + 1]) - px(found.bins[place])];
    const box = (from, to, kind) => svg("rect", { class: kind, x, width: Math.max(0, size - 1), y: py(to), height: py(from) - py(to) });
    const lower = entry.branched_histogram[place];
    return count ? [box(0, lower, "bin opened"), box(lower, count, "bin")] : [];
  });
  const edge = (value, anchor) => svg("text", { class: "tick", x: px(value), y: height - 6, "text-anchor": anchor }, signed(value, 2));
  const lines = [svg("line", { class: "axis", x1: 8, x2: width - 8, y1: height - foot, y2: height - foot })];
  for (const [value, kind] of [[0, "zero"], [found.threshold, "threshold"]]) {
    if (typeof value !== "number" || value < low || value > high) continue;
    lines.push(svg("line", { class: kind, x1: px(value), x2: px(value), y1: 4, y2: height - foot }));
  }
  const words = `dH after ${label(entry).replace(/^after /, "")}: ${number(entry.decisions)} decisions, ${number(entry.branched)} branched`;
  const picture = { role: "img", "aria-label": words, class: "plot", viewBox: `0 0 ${width} ${height}`, width, height };
  return el(
    "figure",
    { class: "chart" },
    el("figcaption", {}, words),
    svg("svg", picture, ...parts, ...lines, edge(low, "start"), edge(high, "end")),
    el("p", { class: "kinds" }, el("span", { class: "kind opened" }, "branched"), el("span", { class: "kind considered" }, "not branched"), el("span", {}, "dashed: 0 and the threshold")),
  );
}
