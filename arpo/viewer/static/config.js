// The settings of a run, and their differences from another run's.

import { choice, clear, el, printable, problem, shorten, table } from "./dom.js";
import { api, exported, get } from "./source.js";
import { go } from "./state.js";

const configView = { request: 0 };

export async function configTab(main, state, run, runs) {
  const key = JSON.stringify([run.id, state.other, runs.length]);
  if (configView.node?.parentNode === main && configView.key === key) return;
  const request = ++configView.request;
  if (configView.node?.parentNode !== main) {
    configView.node = el("div", { class: "config" });
    main.replaceChildren(configView.node);
  }
  configView.key = key;
  const other = runs.find((one) => one.id === state.other && one.id !== run.id);
  try {
    const { config } = await get(api("config", { run: run.id }));
    const lines = other ? await difference(config, run.id, other.id) : null;
    if (request !== configView.request) return;
    const rows = lines ? lines.map((line) => [line.key, shown(line.a), shown(line.b)]) : flat(config).map(([name, value]) => [name, shown(value)]);
    const heads = lines ? ["setting", printable(shorten(run.name, 40)), printable(shorten(other.name, 40))] : ["setting", "value"];
    clear(configView.node).append(configBar(state, run, runs), settingsTable(heads, rows, lines));
  } catch (error) {
    if (request === configView.request) clear(configView.node).append(configBar(state, run, runs), problem(error));
  }
}

async function difference(config, a, b) {
  if (!exported) return (await get(api("diff", { a, b }))).lines;
  const [mine, theirs] = [new Map(flat(config)), new Map(flat((await get(api("config", { run: b }))).config))];
  const keys = [...new Set([...mine.keys(), ...theirs.keys()])];
  return keys
    .map((key) => ({ key, a: mine.get(key), b: theirs.get(key) }))
    .filter((line) => JSON.stringify(line.a) !== JSON.stringify(line.b));
}

function configBar(state, run, runs) {
  const others = runs.filter((one) => one.id !== run.id).map((one) => [one.id, printable(shorten(one.name, 50))]);
  return el(
    "div",
    { class: "bar" },
    el("h2", {}, `Settings of ${printable(shorten(run.name, 60))}`),
    others.length ? choice("difference to", [["", "…"], ...others], state.other ?? "", (other) => go({ other: other || null })) : null,
  );
}

function settingsTable(heads, rows, lines) {
  if (lines && !rows.length) return el("p", { class: "empty" }, "The settings of these two runs are the same.");
  const cells = rows.map((row) => row.map((text, place) => el(place ? "code" : "span", {}, printable(shorten(text, 2000)))));
  const made = table(heads, cells, { class: "settings" });
  if (lines) return made;
  const filter = el("input", { type: "search", placeholder: "filter settings", "aria-label": "Filter settings" });
  filter.addEventListener("input", () => {
    const wanted = filter.value.toLowerCase();
    for (const row of made.querySelectorAll("tbody tr")) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
  return el("div", {}, filter, made);
}

function shown(value) {
  if (value === undefined) return "(not there)";
  return typeof value === "string" ? value : JSON.stringify(value);
}

function flat(value, prefix = "") {
  return Object.entries(value).flatMap(([name, inner]) => {
    const nested = inner !== null && typeof inner === "object" && !Array.isArray(inner) && Object.keys(inner).length;
    return nested ? flat(inner, `${prefix}${name}.`) : [[prefix + name, inner]];
  });
}
