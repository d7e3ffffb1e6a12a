// Building elements. Text from runs is untrusted: it only ever becomes text nodes.

const SVG = "http://www.w3.org/2000/svg";

export function el(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") element.addEventListener(key, value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function table(heads, rows, props = {}) {
  const head = el("tr", {}, ...heads.map((text) => el("th", { scope: "col" }, text)));
  const body = rows.map((cells) =>
    el("tr", {}, ...cells.map((cell, place) => el(place ? "td" : "th", place ? {} : { scope: "row" }, cell))),
  );
  return el("div", { class: "scroll" }, el("table", props, el("thead", {}, head), el("tbody", {}, ...body)));
}

export function choice(label, options, value, change) {
  const made = options.map(([key, text]) => {
    const option = el("option", { value: key }, text);
    option.selected = key === value;
    return option;
  });
  const select = el("select", { change: () => change(select.value) }, ...made);
  return el("label", { class: "choice" }, `${label} `, select);
}

export function toggle(label, on, change, props = {}) {
  const box = el("input", { type: "checkbox", change: () => change(box.checked), ...props });
  box.checked = on;
  return el("label", { class: "toggle" }, box, ` ${label}`);
}

export function problem(error) {
  return el("p", { class: "problem", role: "alert" }, printable(error?.message ?? String(error)));
}

// --- numbers

export function number(value, digits = 3) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3) return value.toExponential(1).replace(/^-/, "−");
  const whole = Number.isInteger(value) || size >= 10 ** digits;
  const options = whole ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: digits };
  return value.toLocaleString("en", options).replace("-", "−");
}

export function signed(value, digits = 3) {
  return typeof value === "number" && value > 0 ? `+${number(value, digits)}` : number(value, digits);
}

export function percent(value, digits = 0) {
  return typeof value === "number" && Number.isFinite(value) ? `${(100 * value).toFixed(digits)} %` : "–";
}

export function seconds(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (value && value < 1) return `${number(1000 * value)} ms`;
  if (value < 120) return `${number(value)} s`;
  return value < 7200 ? `${number(value / 60)} min` : `${number(value / 3600)} h`;
}

const PLURALS = { trajectory: "trajectories", branch: "branches" };

export function mean(values) {
  return values?.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

export function plural(count, word) {
  return `${number(count)} ${count === 1 ? word : (PLURALS[word] ?? `${word}s`)}`;
}

// --- text

// Control characters, bidi marks, lone surrogates, private and unassigned characters, spaces other than the plain one.
const HIDDEN = /(?!\n)(?:[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs})/u;
const HIDDEN_RUNS = /(?:(?!\n)(?:[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}))+/gu;
const SHORT = { "\t": "\\t", "\r": "\\r" };
export const CUT = 20000;
const MARKED = 200000;

export function printable(text) {
  return HIDDEN.test(text) ? text.replace(HIDDEN_RUNS, escapes) : text;
}

function escapes(found) {
  return [...found].map(escapeOne).join("");
}

function escapeOne(character) {
  if (SHORT[character]) return SHORT[character];
  const code = character.codePointAt(0);
  const hex = code.toString(16);
  if (code < 0x100) return `\\x${hex.padStart(2, "0")}`;
  return code < 0x10000 ? `\\u${hex.padStart(4, "0")}` : `\\U${hex.padStart(8, "0")}`;
}

// Appends text to a parent. Escapes are marked, so that they differ from text that looks like an escape.
export function write(parent, text) {
  if (!HIDDEN.test(text) || text.length > MARKED) {
    parent.append(printable(text));
    return parent;
  }
  let at = 0;
  for (const found of text.matchAll(HIDDEN_RUNS)) {
    if (found.index > at) parent.append(text.slice(at, found.index));
    parent.append(el("span", { class: "escape" }, escapes(found[0])));
    at = found.index + found[0].length;
  }
  parent.append(text.slice(at));
  return parent;
}

export function shorten(text, limit) {
  const line = text.slice(0, 8 * limit).replace(/\s+/g, " ").trim();
  return line.length > limit ? `${line.slice(0, cutAt(line, limit - 1))}…` : line;
}

// A block of text: its first part, and a button that shows the rest.
export function block(text, props = {}) {
  const box = el("pre", { class: "text", ...props });
  if (text.length <= CUT) return write(box, text);
  write(box, text.slice(0, cutAt(text, CUT)));
  box.append(showAll(text.length, () => write(clear(box), text)));
  return box;
}

// `limit`, or one less if that would split a surrogate pair.
export function cutAt(text, limit) {
  return /[\ud800-\udbff]/.test(text[limit - 1] ?? "") ? limit - 1 : limit;
}

export function showAll(length, click) {
  return el("button", { type: "button", class: "all", click }, `… show all ${number(length)} characters`);
}

export function clear(element) {
  element.replaceChildren();
  return element;
}

// Replaces an element's children; null, undefined and false are skipped.
export function put(element, ...children) {
  element.replaceChildren(...children.filter((child) => child !== null && child !== undefined && child !== false));
}
