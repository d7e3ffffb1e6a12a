// Text with every token shaded by a number.

import { CUT, clear, cutAt, el, number, printable, showAll, signed, write } from "./dom.js";

export const SHADES = [
  ["entropy", "entropy"],
  ["logprob", "log-prob"],
  ["credit", "credit"],
  ["none", "nothing"],
];
const LEVELS = 9;

// The values that shade a node's tokens; the credit is the same for all tokens of a node.
function shadeValues(node, mode, credit) {
  if (mode === "entropy") return node.entropies ?? [];
  if (mode === "logprob") return (node.logprobs ?? []).map((value) => -value);
  if (mode === "credit" && credit !== null && node.kind === "model") return (node.tokens ?? []).map(() => credit);
  return [];
}

// The value with the darkest shade: the 99th percentile of the tree's tokens.
export function shadeTop(nodes, mode, credits) {
  const every =
    mode === "credit" ? credits.map(Math.abs) : nodes.flatMap((node) => shadeValues(node, mode, null)).map(Math.abs);
  every.sort((a, b) => a - b);
  return every.length ? every[Math.min(every.length - 1, Math.floor(0.99 * every.length))] || 1e-9 : 1;
}

export function shadeClass(value, top) {
  const level = Math.min(LEVELS, Math.round((Math.abs(value) / top) * LEVELS));
  return level === 0 ? "" : value < 0 ? `low${level}` : `high${level}`;
}

export function shadeLegend(mode, top) {
  if (mode === "none") return el("p", { class: "shades" });
  const steps = (sign) => Array.from({ length: LEVELS }, (_, place) => el("i", { class: `${sign}${place + 1}` }));
  const words = { entropy: "nats", logprob: "nats (−log p)", credit: "advantage" }[mode];
  const left = mode === "credit" ? [number(-top), ...steps("low").reverse(), " 0 "] : ["0 "];
  const scale = el("span", { class: "scale", "aria-hidden": "true" }, ...left, ...steps("high"), ` ${number(top)} ${words}`);
  return el("p", { class: "shades" }, el("span", { class: "hidden" }, `Shaded up to ${number(top)} ${words}.`), scale);
}

// A text split into tokens: offsets count code points, strings are indexed in UTF-16 units.
function splitTokens(text, ends) {
  const found = [];
  let points = 0;
  let unit = 0;
  let start = 0;
  for (const end of ends) {
    while (points < end && unit < text.length) {
      unit += text.codePointAt(unit) > 0xffff ? 2 : 1;
      points += 1;
    }
    found.push(text.slice(start, unit));
    start = unit;
  }
  return { found, rest: text.slice(start) };
}

export function shadedText(node, mode, top, credit) {
  const box = el("pre", { class: "text tokens" });
  const values = shadeValues(node, mode, credit);
  if (!node.char_offsets?.length || values.length !== node.char_offsets.length) return plainText(box, node.text);
  fillTokens(box, node, values, top, CUT);
  const readout = el("output", { class: "readout" });
  box.addEventListener("pointerover", (event) => {
    const place = event.target.closest?.("[data-token]")?.dataset.token;
    if (place !== undefined) readout.textContent = describeToken(node, Number(place));
  });
  return el("div", { class: "shaded" }, box, readout);
}

function plainText(box, text) {
  write(box, text.slice(0, cutAt(text, CUT)));
  if (text.length > CUT) box.append(showAll(text.length, () => write(clear(box), text)));
  return box;
}

function fillTokens(box, node, values, top, limit) {
  const { found, rest } = splitTokens(node.text, node.char_offsets);
  let length = 0;
  let cut = false;
  found.forEach((piece, place) => {
    if (length >= limit) {
      cut = true;
      return;
    }
    const shown = length + piece.length > limit ? piece.slice(0, cutAt(piece, limit - length)) : piece;
    cut = cut || shown.length < piece.length;
    length += piece.length;
    const props = { class: `token ${shadeClass(values[place], top)}`.trim(), "data-token": place };
    box.append(write(el("span", props), shown));
  });
  if (cut) box.append(showAll(node.text.length, () => fillTokens(clear(box), node, values, top, Infinity)));
  else write(box, rest);
}

function describeToken(node, place) {
  const parts = [`token ${place + 1} of ${node.tokens.length}`, `id ${node.tokens[place]}`];
  if (node.entropies?.length) parts.push(`H ${number(node.entropies[place])}`);
  if (node.logprobs?.length) parts.push(`log p ${signed(node.logprobs[place])}`);
  return parts.join(", ");
}

// The tokens as a table, for keyboards and screen readers; built when it is opened.
export function tokenTable(node) {
  if (!node.entropies?.length) return null;
  const box = el("details", { class: "more" }, el("summary", {}, "Tokens as a table"));
  box.addEventListener("toggle", () => {
    if (box.open && box.children.length === 1) box.append(tokenRows(node));
  });
  return box;
}

function tokenRows(node) {
  const { found } = splitTokens(node.text, node.char_offsets ?? []);
  const cell = (text) => el("td", {}, text);
  const rows = node.tokens.slice(0, 2000).map((id, place) =>
    el(
      "tr",
      {},
      cell(number(place + 1)),
      el("td", { class: "mono" }, printable((found[place] ?? "").slice(0, 200)).replaceAll("\n", "\\n")),
      cell(String(id)),
      cell(number(node.entropies[place])),
      cell(signed(node.logprobs[place])),
    ),
  );
  const heads = ["", "text", "id", "H", "log p"].map((text) => el("th", { scope: "col" }, text));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows)));
}
