// The picture of a rollout tree: an SVG that is also a tree for keyboards and screen readers.

import { el, mean, number, percent, plural, printable, shorten, signed, svg } from "./dom.js";
import { NODE_HEIGHT, layoutTree, neighbor, prefixOf } from "./layout.js";
import { parseIndex } from "./state.js";
import { shadeClass, shadeTop } from "./tokens.js";

const STRIP = 24;
const drawnTrees = new WeakMap(); // the tree in each box
const SMALLEST = 0.72; // a wide tree is drawn no smaller than this; beyond that it scrolls

export function correctMark(reward) {
  const correct = reward?.parts?.correct;
  if (typeof correct !== "number") return "";
  return correct >= 1 ? "✓" : correct > 0 ? "½" : "✗";
}

// The item that the address names, or else `fallback`, and the trajectory that is highlighted, or null.
export function selection(tree, state, fallback = "n0") {
  const leaf = parseIndex(state.leaf);
  const trajectory = tree.leaves[leaf] ? leaf : null;
  const node = parseIndex(state.node);
  if (tree.nodes[node] && !(state.chat && trajectory !== null)) return { chosen: `n${node}`, trajectory };
  if (trajectory !== null) return { chosen: `l${trajectory}`, trajectory };
  return { chosen: fallback, trajectory: fallback[0] === "l" ? Number(fallback.slice(1)) : null };
}

// Draws a tree into a box with its legend; focus stays, and so does the place to which the same tree was scrolled.
export function showPicture(box, tree, { chosen, trajectory, open }) {
  const focused = box.contains(document.activeElement);
  const from = drawnTrees.get(box) === tree ? [box.scrollLeft, box.scrollTop] : [0, 0];
  const top = shadeTop(tree.nodes, "entropy", []);
  const picture = drawTree(tree, { top, chosen, trajectory, open, maxWidth: box.clientWidth || 800 });
  box.replaceChildren(picture, kinds());
  drawnTrees.set(box, tree);
  [box.scrollLeft, box.scrollTop] = from;
  pinRewards(picture, box);
  if (focused) picture.querySelector(`[data-item="${chosen}"]`)?.focus({ preventScroll: true });
}

// `open(item)` is called with "n3" or "l1" when a node or a leaf is selected.
function drawTree(tree, { top, chosen, trajectory, open, maxWidth }) {
  const layout = layoutTree(tree);
  const on = new Set(trajectory === null ? [] : prefixOf(tree.nodes, tree.leaves[trajectory].node));
  const items = new Map();
  const layers = [svg("g"), svg("g"), svg("g", { class: "ends" })];
  const left = Math.min(...layout.leafPlaces.map((end) => end.x)) - 8;
  if (layout.leafPlaces.length) layers[2].append(svg("rect", { class: "backing", x: left, y: 0, width: layout.width - left, height: layout.height }));
  for (const place of layout.places) {
    if (place.parent !== null) layers[0].append(edge(layout.places[place.parent], place, on.has(place.index)));
    items.set(`n${place.index}`, drawNode(tree, layout, place, top, on.has(place.index)));
  }
  for (const end of layout.leafPlaces) {
    layers[0].append(leafLine(layout.places[end.node], end, end.number === trajectory));
    items.set(`l${end.number}`, drawLeaf(tree, layout, end, end.number === trajectory));
  }
  const focused = items.has(chosen) ? chosen : "n0";
  for (const [name, item] of items) {
    item.setAttribute("tabindex", name === focused ? "0" : "-1");
    item.setAttribute("aria-selected", String(name === chosen));
    item.setAttribute("data-item", name);
    item.addEventListener("click", () => open(name));
    layers[name.startsWith("l") ? 2 : 1].append(item);
  }
  const label = `Rollout tree: ${plural(tree.nodes.length, "node")}, ${plural(tree.leaves.length, "trajectory")}`;
  const scale = Math.min(1, Math.max(SMALLEST, maxWidth / layout.width));
  const size = { width: scale * layout.width, height: scale * layout.height, viewBox: `0 0 ${layout.width} ${layout.height}` };
  const picture = svg("svg", { role: "tree", "aria-label": label, class: "tree", ...size }, ...layers);
  picture.addEventListener("keydown", (event) => onTreeKey(event, layout, items, open));
  return picture;
}

// Rewards stay in sight beside a tree that is wider than its box.
function pinRewards(picture, box) {
  const ends = picture.querySelector(".ends");
  const pin = () => {
    const hidden = Math.max(0, picture.getBoundingClientRect().right - box.getBoundingClientRect().left - box.clientWidth);
    const scale = picture.width.baseVal.value / picture.viewBox.baseVal.width;
    ends.setAttribute("transform", `translate(${-hidden / scale} 0)`);
  };
  box.onscroll = pin;
  pin();
}

function onTreeKey(event, layout, items, open) {
  const item = event.target.closest("[data-item]")?.dataset.item;
  if (!item) return;
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    open(item);
    return;
  }
  if (!/^(Arrow|Home)/.test(event.key)) return;
  event.preventDefault();
  const next = items.get(neighbor(layout, item, event.key));
  for (const other of items.values()) other.setAttribute("tabindex", other === next ? "0" : "-1");
  next.focus();
}

function edge(from, to, on) {
  const x = from.x + from.width;
  const middle = (x + to.x) / 2;
  const curve = `M${x} ${from.y}C${middle} ${from.y} ${middle} ${to.y} ${to.x} ${to.y}`;
  return svg("path", { class: on ? "edge on" : "edge", d: curve });
}

function leafLine(place, end, on) {
  return svg("path", { class: on ? "leader on" : "leader", d: `M${place.x + place.width} ${end.y}H${end.x - 6}` });
}

function shape(kind, width) {
  const half = NODE_HEIGHT / 2;
  if (kind === "tool") return `M8 ${-half}H${width - 8}L${width} 0L${width - 8} ${half}H8L0 0Z`;
  const round = kind === "prompt" ? half : 3;
  const across = width - 2 * round;
  return `M${round} ${-half}h${across}a${round} ${round} 0 0 1 ${round} ${round}v${NODE_HEIGHT - 2 * round}a${round} ${round} 0 0 1 ${-round} ${round}h${-across}a${round} ${round} 0 0 1 ${-round} ${-round}v${2 * round - NODE_HEIGHT}a${round} ${round} 0 0 1 ${round} ${-round}Z`;
}

function drawNode(tree, layout, place, top, on) {
  const node = tree.nodes[place.index];
  const failed = node.result?.fault || node.call?.error;
  const words = describeNode(node, place.index);
  const classes = `node ${node.kind}${failed ? " failed" : ""}${node.live ? " growing" : ""}${on ? " on" : ""}`;
  const level = { "aria-level": place.depth + 1, ...ariaPosition(layout, place) };
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

function ariaPosition(layout, place) {
  if (place.parent === null) return { "aria-setsize": 1, "aria-posinset": 1, "aria-expanded": "true" };
  const siblings = layout.places[place.parent].children;
  const opened = place.children.length || place.leaves.length ? { "aria-expanded": "true" } : {};
  return { "aria-setsize": siblings.length, "aria-posinset": siblings.indexOf(place.index) + 1, ...opened };
}

// The entropies of a turn, as a strip at the bottom of its node.
function strip(entropies, width, top) {
  const count = Math.min(STRIP, entropies.length);
  const inner = width - 6;
  return Array.from({ length: count }, (_, place) => {
    const from = Math.floor((place * entropies.length) / count);
    const to = Math.floor(((place + 1) * entropies.length) / count);
    const box = { x: 3 + (place * inner) / count, y: 5, width: inner / count, height: 6 };
    return svg("rect", { class: `strip ${shadeClass(mean(entropies.slice(from, to)), top)}`.trim(), ...box });
  });
}

function decisionMark(decision, width) {
  const opened = decision.branches > 0;
  const mark = svg("path", { class: opened ? "branch opened" : "branch", d: "M0 -6L6 0L0 6L-6 0Z" });
  mark.setAttribute("transform", `translate(${width + 7} 0)`);
  const words = `dH ${signed(decision.delta, 2)}${opened ? ` +${decision.branches}` : ""}`;
  return [mark, svg("text", { class: opened ? "delta opened" : "delta", x: width / 2, y: 25 }, words)];
}

export function describeDecision(decision) {
  const numbers = `H ${number(decision.entropy)}, dH ${signed(decision.delta)}, P ${number(decision.probability)}`;
  const done = decision.branches > 0 ? `${plural(decision.branches, "branch")} opened` : "not branched";
  return `${numbers}: ${done} (${printable(decision.reason)})`;
}

function describeNode(node, index) {
  const parts = [`node ${index}, ${node.kind}${node.live ? ", in progress" : ""}`];
  if (node.kind === "tool") parts.push(printable(shorten(node.call?.name ?? "", 40)));
  parts.push(plural(node.tokens?.length ?? 0, "token"));
  const fault = node.result?.fault ?? (node.call?.error ? "model" : null);
  if (fault) parts.push(`failed (${fault})`);
  if (node.result?.cached) parts.push("cached");
  if (node.entropies?.length) parts.push(`mean entropy ${number(mean(node.entropies))}`);
  if (node.decision) parts.push(describeDecision(node.decision));
  return parts.join(", ");
}

export function rewardParts(reward) {
  return Object.entries(reward?.parts ?? {}).map(([name, value]) => `${printable(shorten(name, 40))} ${number(value)}`).join(", ");
}

// What the reward says in words, like why a format is wrong.
export function rewardNote(reward) {
  return printable(shorten(reward?.note ?? "", 400));
}

export function describeLeaf(tree, leaf) {
  if (!tree.rewards.length) return `trajectory ${leaf + 1}: ended by ${tree.leaves[leaf].stop_reason}, ${answerOf(tree.leaves[leaf])}`;
  const [reward, credit] = [tree.rewards[leaf], tree.credits[leaf]];
  const parts = rewardParts(reward) && ` (${rewardParts(reward)})`;
  const masked = tree.mask[leaf] === false ? ", left out of training" : "";
  const note = rewardNote(reward) && `; ${rewardNote(reward)}`;
  return `trajectory ${leaf + 1}: ended by ${tree.leaves[leaf].stop_reason}, reward ${number(reward?.total)}${parts}${credit ? `, advantage ${signed(credit.advantage)}` : ""}${masked}${note}`;
}

function answerOf(leaf) {
  return typeof leaf.answer === "string" ? `answer: ${printable(shorten(leaf.answer, 200))}` : "no answer";
}

function drawLeaf(tree, layout, end, on) {
  const [reward, credit] = [tree.rewards[end.number], tree.credits[end.number]];
  const words = describeLeaf(tree, end.number);
  const siblings = layout.places[end.node].leaves;
  const masked = tree.mask[end.number] === false;
  const props = {
    role: "treeitem",
    class: `end${on ? " on" : ""}${masked ? " masked" : ""}`,
    transform: `translate(${end.x} ${end.y})`,
    "aria-label": words,
    "aria-level": layout.places[end.node].depth + 2,
    "aria-setsize": siblings.length,
    "aria-posinset": siblings.indexOf(end.number) + 1,
  };
  const glyph = correctMark(reward);
  const column = (x, text, kind) => svg("text", { x, y: 4, class: kind }, text);
  const numbers = [column(18, number(reward?.total), "reward"), credit && column(54, `A ${signed(credit.advantage, 2)}`, "advantage")];
  const answer = printable(shorten(tree.leaves[end.number].answer ?? "–", 15));
  return svg(
    "g",
    props,
    svg("title", {}, words),
    svg("rect", { class: "shape", x: -4, y: -13, width: 170, height: 26, rx: 4 }),
    column(2, glyph, glyph === "✓" ? "right" : "wrong"),
    ...(tree.rewards.length ? numbers : [column(4, answer, "reward")]),
    column(108, tree.leaves[end.number].stop_reason + (masked ? ", masked" : ""), "why"),
  );
}

export function accuracyText(value) {
  return typeof value === "number" ? `, ${percent(value)} correct` : "";
}

function kinds() {
  const item = (kind, text) => el("span", { class: `kind ${kind}` }, text);
  return el(
    "p",
    { class: "kinds" },
    item("prompt", "Q prompt"),
    item("model", "M model, tokens, strip: entropy"),
    item("tool", "tool result"),
    item("failed", "! failed call"),
    item("opened", "◆ branched here"),
    item("considered", "◇ considered, not branched"),
  );
}
