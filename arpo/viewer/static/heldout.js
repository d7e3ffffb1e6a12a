// Accuracy on held-out questions by kind, at a run's first evaluation and at its last.

import { el, number, percent, plural, printable, shorten, signed, table } from "./dom.js";
import { api, get } from "./source.js";

const evaluated = new Map();
const INTERVALS = "In brackets: 95 % intervals.";

export async function loadEvaluations(id) {
  evaluated.set(id, await get(api("evaluations", { run: id })));
}

// Nothing if the run holds no evaluations.
export function heldOutTable(run) {
  const { evaluations = [], damaged = 0 } = evaluated.get(run.id) ?? {};
  const name = printable(shorten(run.name, 60));
  const note = damaged ? [el("p", { class: "note" }, `${name}: ${plural(damaged, "damaged evaluation")} left out`)] : [];
  if (!evaluations.length) return note;
  const [first, last] = [evaluations[0], evaluations.at(-1)];
  const shown = evaluations.length > 1 ? [first, last] : [first];
  const row = (label, pick) => [label, number(pick(first)?.questions), ...shown.map((one) => withInterval(pick(one))), ...change(shown.map(pick))];
  const kinds = Object.keys(first.by_kind).map((kind) => row(printable(shorten(kind, 60)), (one) => one.by_kind[kind]));
  const heads = ["kind of question", "questions", ...shown.map(whenOf), ...(shown.length > 1 ? ["change, points"] : [])];
  const rows = [...kinds, row("all", (one) => one.accuracy)];
  const when = shown.length > 1 && !first.step ? ", before and after training" : "";
  return [el("h2", {}, `${name}: held-out questions${when}`), table(heads, rows, { class: "heldout" }), el("p", { class: "note" }, INTERVALS), ...note];
}

function whenOf(one) {
  return one.step ? `after step ${number(one.step)}` : "before training";
}

export function withInterval(found) {
  return found ? `${percent(found.value, 1)} (${percent(found.low, 1)} to ${percent(found.high, 1)})` : "–";
}

function change(found) {
  if (found.length < 2) return [];
  const [one, other] = found;
  return [one && other ? signed(Math.round(1000 * (other.value - one.value)) / 10) : "–"];
}
