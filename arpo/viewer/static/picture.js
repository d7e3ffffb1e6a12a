// The picture of a rollout tree: an SVG that is also a tree for keyboards and screen readers.

import { number, percent, plural, printable, shorten, signed, svg } from "./dom.js";
import { NODE_HEIGHT, layTree, neighbour, pathTo } from "./layout.js";
import { shadeClass } from "./tokens.js";

const STRIP = 24;
const SMALLEST = 0.72; // a wide tree is drawn no smaller than this; beyond that it scrolls

export function rightness(reward) {
  const correct = reward?.parts?.correct;
  if (typeof correct !== "number") return "";
  return correct >= 1 ? "✓" : correct > 0 ? "½" : "✗";
}

// `open(item)` is called with "n3" or "l1" when a node or the end of a path is chosen.
export function drawTree(tree, { top, chosen, path, open, room }) {
  const laid = layTree(tree);
  const on = new Set(path === null ? [] : pathTo(tree.nodes, tree.leaves[path].node));
  const items = new Map();
  const layers = [svg("g"), svg("g")];
  for (const place of laid.places) {
    if (place.parent !== null) layers[0].append(edge(laid.places[place.parent], place, on.has(place.index)));
    items.set(`n${place.index}`, drawNode(tree, laid, place, top, on.has(place.index)));
  }
  for (const end of laid.ends) {
    layers[0].append(leader(laid.places[end.node], end, end.number === path));
    items.set(`l${end.number}`, drawEnd(tree, laid, end, end.number === path));
  }
  const focused = items.has(chosen) ? chosen : "n0";
  for (const [name, item] of items) {
    item.setAttribute("tabindex", name === focused ? "0" : "-1");
    item.setAttribute("aria-selected", String(name === chosen));
    item.setAttribute("data-item", name);
    item.addEventListener("click", () => open(name));
    layers[1].append(item);
  }
  const label = `Rollout tree: ${plural(tree.nodes.length, "node")}, ${plural(tree.leaves.length, "path")}`;
  const scale = Math.min(1, Math.max(SMALLEST, room / laid.width));
  const size = { width: scale * laid.width, height: scale * laid.height, viewBox: `0 0 ${laid.width} ${laid.height}` };
  const picture = svg("svg", { role: "tree", "aria-label": label, class: "tree", ...size }, ...layers);
  picture.addEventListener("keydown", (event) => steer(event, laid, items, open));
  return picture;
}

function steer(event, laid, items, open) {
  const item = event.target.closest("[data-item]")?.dataset.item;
  if (!item) return;
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    open(item);
    return;
  }
  if (!/^(Arrow|Home)/.test(event.key)) return;
  event.preventDefault();
  const next = items.get(neighbour(laid, item, event.key));
  for (const other of items.values()) other.setAttribute("tabindex", other === next ? "0" : "-1");
  next.focus();
}

function edge(from, to, on) {
  const x = from.x + from.width;
  const middle = (x + to.x) / 2;
  const path = `M${x} ${from.y}C${middle} ${from.y} ${middle} ${to.y} ${to.x} ${to.y}`;
  return svg("path", { class: on ? "edge on" : "edge", d: path });
}

function leader(place, end, on) {
  return svg("path", { class: on ? "leader on" : "leader", d: `M${place.x + place.width} ${end.y}H${end.x - 6}` });
}

function shape(kind, width) {
  const half = NODE_HEIGHT / 2;
  if (kind === "tool") return `M8 ${-half}H${width - 8}L${width} 0L${width - 8} ${half}H8L0 0Z`;
  const round = kind === "prompt" ? half : 3;
  const across = width - 2 * round;
  return `M${round} ${-half}h${across}a${round} ${round} 0 0 1 ${round} ${round}v${NODE_HEIGHT - 2 * round}a${round} ${round} 0 0 1 ${-round} ${round}h${-across}a${round} ${round} 0 0 1 ${-round} ${-round}v${2 * round - NODE_HEIGHT}a${round} ${round} 0 0 1 ${round} ${-round}Z`;
}

function drawNode(tree, laid, place, top, on) {
  const node = tree.nodes[place.index];
  const failed = node.result?.fault || node.call?.error;
  const words = nodeWords(node, place.index);
  const classes = `node ${node.kind}${failed ? " failed" : ""}${on ? " on" : ""}`;
  const level = { "aria-level": place.depth + 1, ...among(laid, place) };
  const parts = [svg("title", {}, words), svg("path", { class: "shape", d: shape(node.kind, place.width) })];
  if (node.kind === "model") parts.push(...strip(node.entropies ?? [], place.width, top));
  const size = node.kind === "tool" ? printable(node.call?.name ?? "tool") : number(node.tokens?.length ?? 0);
  const prefix = { prompt: "Q ", model: "M ", tool: failed ? "! " : "" }[node.kind] ?? "";
  const label = shorten(prefix + size, Math.max(4, Math.floor((place.width - 12) / 6.6)));
  parts.push(svg("text", { class: "label", x: place.width / 2, y: node.kind === "model" ? -1 : 4 }, label));
  if (node.result?.cached) parts.push(svg("text", { class: "cached", x: 4, y: -17 }, "cached"));
  if (node.decision) parts.push(...decisionMark(node.decision, place.width));
  const props = { role: "treeitem", class: classes, transform: `translate(${place.x} ${place.y})`, "aria-label": words };
  return svg("g", { ...props, ...level }, ...parts);
}

function among(laid, place) {
  if (place.parent === null) return { "aria-setsize": 1, "aria-posinset": 1, "aria-expanded": "true" };
  const siblings = laid.places[place.parent].children;
  const opened = place.children.length || place.leaves.length ? { "aria-expanded": "true" } : {};
  return { "aria-setsize": siblings.length, "aria-posinset": siblings.indexOf(place.index) + 1, ...opened };
}

// The entropies along a turn, as a strip at the foot of its node.
function strip(entropies, width, top) {
  const count = Math.min(STRIP, entropies.length);
  const inner = width - 6;
  return Array.from({ length: count }, (_, place) => {
    const from = Math.floor((place * entropies.length) / count);
    const to = Math.floor(((place + 1) * entropies.length) / count);
    const part = entropies.slice(from, to);
    const mean = part.reduce((sum, value) => sum + value, 0) / part.length;
    const box = { x: 3 + (place * inner) / count, y: 5, width: inner / count, height: 6 };
    return svg("rect", { class: `strip ${shadeClass(mean, top)}`.trim(), ...box });
  });
}

function decisionMark(decision, width) {
  const opened = decision.branches > 0;
  const mark = svg("path", { class: opened ? "branch opened" : "branch", d: "M0 -6L6 0L0 6L-6 0Z" });
  mark.setAttribute("transform", `translate(${width + 7} 0)`);
  const words = `dH ${signed(decision.delta, 2)}${opened ? ` +${decision.branches}` : ""}`;
  return [mark, svg("text", { class: opened ? "delta opened" : "delta", x: width / 2, y: 25 }, words)];
}

export function decisionWords(decision) {
  const numbers = `H ${number(decision.entropy)}, dH ${signed(decision.delta)}, P ${number(decision.probability)}`;
  const done = decision.branches > 0 ? `${plural(decision.branches, "path")} opened` : "not branched";
  return `${numbers}: ${done} (${printable(decision.reason)})`;
}

function nodeWords(node, index) {
  const parts = [`node ${index}, ${node.kind}`];
  if (node.kind === "tool") parts.push(printable(shorten(node.call?.name ?? "", 40)));
  parts.push(plural(node.tokens?.length ?? 0, "token"));
  const fault = node.result?.fault ?? (node.call?.error ? "model" : null);
  if (fault) parts.push(`failed (${fault})`);
  if (node.result?.cached) parts.push("cached");
  if (node.entropies?.length) {
    const mean = node.entropies.reduce((sum, value) => sum + value, 0) / node.entropies.length;
    parts.push(`mean entropy ${number(mean)}`);
  }
  if (node.decision) parts.push(decisionWords(node.decision));
  return parts.join(", ");
}

export function endWords(tree, number_) {
  const [leaf, reward, credit] = [tree.leaves[number_], tree.rewards[number_], tree.credits[number_]];
  const parts = Object.entries(reward?.parts ?? {}).map(([name, value]) => `${printable(shorten(name, 40))} ${number(value)}`);
  const masked = tree.mask[number_] === false ? ", left out of training" : "";
  const made = parts.length ? ` (${parts.join(", ")})` : "";
  return `trajectory ${number_ + 1}: ended by ${leaf.stop_reason}, reward ${number(reward?.total)}${made}, advantage ${signed(credit?.advantage)}${masked}`;
}

function drawEnd(tree, laid, end, on) {
  const [reward, credit] = [tree.rewards[end.number], tree.credits[end.number]];
  const words = endWords(tree, end.number);
  const siblings = laid.places[end.node].leaves;
  const masked = tree.mask[end.number] === false;
  const props = {
    role: "treeitem",
    class: `end${on ? " on" : ""}${masked ? " dropped" : ""}`,
    transform: `translate(${end.x} ${end.y})`,
    "aria-label": words,
    "aria-level": laid.places[end.node].depth + 2,
    "aria-setsize": siblings.length,
    "aria-posinset": siblings.indexOf(end.number) + 1,
  };
  const glyph = rightness(reward);
  const column = (x, text, kind) => svg("text", { x, y: 4, class: kind }, text);
  return svg(
    "g",
    props,
    svg("title", {}, words),
    svg("rect", { class: "shape", x: -4, y: -13, width: 170, height: 26, rx: 4 }),
    column(2, glyph, glyph === "✓" ? "right" : "wrong"),
    column(18, number(reward?.total), "reward"),
    column(54, `A ${signed(credit?.advantage, 2)}`, "advantage"),
    column(108, tree.leaves[end.number].stop_reason + (masked ? ", out" : ""), "why"),
  );
}

export function shareWords(value) {
  return typeof value === "number" ? `, ${percent(value)} right` : "";
}
