// The list of runs at the left.

import { badge } from "./charts.js";
import { el, number, percent, printable, shorten } from "./dom.js";
import { go } from "./state.js";

const listed = { key: "" };

export function runList(box, runs, state, current) {
  const key = JSON.stringify([runs, state.run, current?.id]);
  if (key === listed.key) return;
  listed.key = key;
  const focused = document.activeElement?.dataset?.control;
  const all = runs.length > 1 ? [allButtons(runs, state)] : [];
  const rows = runs.map((run) => runRow(run, state, run.id === current?.id));
  const none = el("p", { class: "empty" }, "No runs here yet. `arpo train` and `arpo demo` make them.");
  box.replaceChildren(...all, rows.length ? el("ul", { class: "runs", "aria-label": "Runs" }, ...rows) : none);
  if (focused) [...box.querySelectorAll("[data-control]")].find((one) => one.dataset.control === focused)?.focus();
}

function allButtons(runs, state) {
  const set = (ids) => () => go({ run: ids });
  const button = (text, ids) => el("button", { type: "button", class: "link", click: set(ids) }, text);
  return el("p", { class: "bar" }, button("all", runs.map((run) => run.id)), button("none", ["-"]), el("small", {}, `${state.run.filter((id) => id !== "-").length} shown`));
}

function runRow(run, state, current) {
  const on = state.run.includes(run.id);
  const box = el("input", { type: "checkbox", "aria-label": `Show ${printable(shorten(run.name, 60))}`, "data-control": `box ${run.id}` });
  box.checked = on;
  const without = state.run.filter((id) => id !== run.id && id !== "-");
  box.addEventListener("change", () => go({ run: on ? (without.length ? without : ["-"]) : [...without, run.id] }));
  const reset = { step: null, n: null, node: null, leaf: null, chat: null, q: null, steps: null };
  const choose = () => go({ at: run.id, run: on ? state.run : [...without, run.id], ...reset });
  const numbers = [
    `step ${number(run.steps)}`,
    run.kind === "sft" ? "SFT" : `reward ${number(run.reward)}`,
    typeof run.test_accuracy === "number" ? `held-out ${percent(run.test_accuracy)}` : "",
  ];
  const name = el(
    "button",
    { type: "button", class: "run", "aria-current": current ? "true" : null, click: choose, "data-control": `run ${run.id}` },
    el("span", { class: "named" }, badge(run.place), ` ${printable(shorten(run.name, 60))}`, run.live ? el("span", { class: "live" }, "live") : null),
    el("small", {}, numbers.filter(Boolean).join(" · ")),
  );
  return el("li", {}, box, name);
}
