// The list of a step's prompts with filters, and the search in its texts.

import { el, number, percent, plural, printable, problem, shorten, toggle, write } from "./dom.js";
import { api, exported, get } from "./source.js";
import { go } from "./state.js";

const FILTERS = [
  ["failed", "no trajectory correct", (tree) => (tree.accuracy === null ? tree.max_reward <= 0 : tree.accuracy === 0)],
  ["informative", "informative groups", (tree) => tree.informative],
  ["branched", "branched", (tree) => tree.branch_points > 0],
  ["errors", "tool errors", (tree) => tree.tool_errors > 0],
];

const HITS = 200;

export function filtered(trees, only) {
  const wanted = FILTERS.filter(([key]) => only.includes(key));
  return trees.filter((tree) => wanted.every(([, , holds]) => holds(tree)));
}

export function filterBar(state) {
  const boxes = FILTERS.map(([key, label]) =>
    toggle(label, state.only.includes(key), (on) =>
      go({ only: on ? [...state.only, key] : state.only.filter((other) => other !== key) }),
    ),
  );
  return el("fieldset", { class: "filters" }, el("legend", {}, "Only"), ...boxes);
}

export function promptList(trees, state, chosen) {
  const shown = filtered(trees, state.only);
  const rows = shown.map((tree) => promptRow(tree, tree.n === chosen));
  const count = `${number(shown.length)} of ${plural(trees.length, "prompt")}`;
  return el(
    "div",
    {},
    el("p", { class: "count", role: "status" }, count),
    el("ul", { class: "prompts", "aria-label": "Prompts" }, ...rows),
  );
}

function promptRow(tree, chosen) {
  const flags = [
    tree.branch_points > 0 ? `◆ ${number(tree.branch_points)}` : "",
    tree.tool_calls ? plural(tree.tool_calls, "call") : "",
    tree.tool_errors > 0 ? `! ${plural(tree.tool_errors, "error")}` : "",
    tree.informative ? "informative" : "",
  ];
  const open = () => go({ n: tree.n, node: null, leaf: null, chat: null });
  const numbers = `${number(tree.mean_reward)}${typeof tree.accuracy === "number" ? ` · ${percent(tree.accuracy)} correct` : ""}`;
  return el(
    "li",
    {},
    el(
      "button",
      { type: "button", class: "asked", "aria-current": chosen ? "true" : null, "data-n": tree.n, click: open },
      el("span", { class: "question" }, printable(shorten(tree.question, 160))),
      el("small", {}, `#${tree.n} ${printable(shorten(tree.kind ?? "", 24))} · reward ${numbers} · ${plural(tree.num_trajectories, "trajectory")}`),
      el("small", { class: "flags" }, flags.filter(Boolean).join(" · ")),
    ),
  );
}

export async function hitList(run, step, trees, text) {
  try {
    const { hits, more, damaged } = exported ? await searchEmbedded(run, step, trees, text) : await get(api("search", { run, step, q: text }));
    const rows = hits.map((hit) => hitRow(hit));
    const count = more ? `the first ${number(hits.length)} places` : plural(hits.length, "place");
    const lost = damaged ? `; not searched: ${plural(damaged, "damaged tree")}` : "";
    const found = el("p", { class: "count", role: "status" }, `${count} with “${printable(shorten(text, 60))}”${lost}`);
    return el("div", {}, found, el("ul", { class: "prompts hits", "aria-label": "Search results" }, ...rows));
  } catch (error) {
    return problem(error);
  }
}

function hitRow(hit) {
  const open = () => go({ n: hit.n, node: hit.node, leaf: null, chat: null });
  const line = el("span", { class: "question" });
  write(line, hit.before);
  line.append(write(el("mark"), hit.match));
  write(line, hit.after);
  return el(
    "li",
    {},
    el("button", { type: "button", class: "asked", click: open }, line, el("small", {}, `prompt #${hit.n}, node ${hit.node}`)),
  );
}

// Gives what the server's search would; trees that this page lacks count as damaged.
async function searchEmbedded(run, step, trees, text) {
  const wanted = new RegExp(text.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&"), "giu");
  const hits = [];
  let damaged = 0;
  for (const { n } of trees) {
    const tree = await get(api("tree", { run, step, n })).catch(() => null);
    if (!tree) damaged += 1;
    for (const [index, node] of (tree?.nodes ?? []).entries()) {
      for (const { 0: match, index: at } of node.text.matchAll(wanted)) {
        if (hits.length === HITS) return { hits, more: true, damaged };
        const end = at + match.length;
        hits.push({ n, node: index, match, before: node.text.slice(Math.max(0, at - 60), at), after: node.text.slice(end, end + 60) });
      }
    }
  }
  return { hits, more: false, damaged };
}
