// The details of one node, and a trajectory as a conversation.

import { block, choice, el, mean, number, plural, printable, seconds, shorten, signed, table } from "./dom.js";
import { imageFigures } from "./images.js";
import { prefixOf } from "./layout.js";
import { correctMark, describeDecision, describeLeaf, rewardNote, rewardParts } from "./picture.js";
import { SHADES, shadeLegend, shadeTop, shadedText, tokenTable } from "./tokens.js";
import { go } from "./state.js";

const NAMES = { prompt: "Prompt", model: "Model", tool: "Tool" };
const FAULTS = {
  model: "the model's mistake",
  timeout: "timeout",
  infra: "the tool was unavailable",
};

export function detailPanel(tree, state, chosen, trajectory, origin) {
  const mode = SHADES.some(([key]) => key === state.shade) ? state.shade : "entropy";
  const credits = tree.credits.flatMap((credit) => Object.values(credit.by_node));
  const top = shadeTop(tree.nodes, mode, credits);
  const bar = el(
    "div",
    { class: "bar" },
    choice("shade tokens by", SHADES, mode, (shade) => go({ shade: shade === "entropy" ? null : shade }, { replace: true })),
    shadeLegend(mode, top),
  );
  const unknown = tree.nodes.some((node) => node.kind === "model" && node.tokens.length && !node.char_offsets?.length);
  const note = unknown && mode !== "none" ? "This run has no character offsets of tokens, so its text is not shaded." : null;
  const reading = trajectory !== null && chosen === `l${trajectory}`;
  const body = reading ? conversation(tree, trajectory, mode, top, origin) : nodePanel(tree, Number(chosen.slice(1)), mode, top, trajectory, origin);
  return el("section", { class: "detail", "aria-label": "Details" }, bar, note && el("p", { class: "note" }, note), ...body);
}

// The advantage of a node's tokens: on the selected trajectory, or the mean over all unmasked trajectories.
function creditOf(tree, index, trajectory) {
  const through = tree.credits.filter((credit, leaf) => tree.mask[leaf] && (trajectory === null || leaf === trajectory));
  return mean(through.map((credit) => credit.by_node[index]).filter((value) => typeof value === "number"));
}

function facts(rows) {
  const parts = rows.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("dl", { class: "facts" }, ...parts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function nodePanel(tree, index, mode, top, trajectory, origin) {
  const node = tree.nodes[index];
  if (!node) return [el("p", { class: "empty" }, "There is no such node.")];
  const credit = creditOf(tree, index, trajectory);
  const model = node.kind === "model";
  const rows = [
    ["tokens", number(node.tokens.length)],
    ["time", seconds(node.seconds)],
    ["mean entropy", model ? `${number(mean(node.entropies))} nats` : null],
    ["mean log-prob", model ? signed(mean(node.logprobs)) : null],
    [trajectory === null ? "mean advantage" : `advantage, trajectory ${trajectory + 1}`, model ? signed(credit) : null],
    ["stopped at", node.stop === null ? null : el("code", {}, printable(shorten(String(node.stop), 80)))],
    ["policy version", model ? number(node.policy_version) : null],
  ];
  const parts = [el("h3", { tabindex: "-1", id: "detail-title" }, `Node ${index}: ${title(node)}`), facts(rows)];
  const images = imageFigures(tree, index, origin);
  if (node.kind === "tool") parts.push(...toolParts(node, images));
  if (model) parts.push(el("h4", {}, "Text"), shadedText(node, mode, top, credit), tokenTable(node));
  if (node.kind === "prompt") parts.push(el("h4", {}, "Text"), block(node.text), ...images, ...taskParts(tree.task));
  parts.push(...trajectoryTable(tree, index));
  return parts.filter((part) => part !== null);
}

function title(node) {
  return node.kind === "tool" ? `tool ${printable(shorten(node.call?.name ?? "", 60))}` : NAMES[node.kind].toLowerCase();
}

function taskParts(task) {
  const answers = task.answers.map((answer) => el("li", {}, printable(shorten(answer, 500))));
  const kind = task.kind ? ` (${printable(shorten(task.kind, 60))})` : "";
  return [
    el("h4", {}, `Task ${printable(shorten(task.id, 80))}${kind}`),
    block(task.question),
    ...(answers.length ? [el("h4", {}, "Right answers"), el("ul", {}, ...answers)] : []),
    ...columnParts(task.meta ?? {}),
  ];
}

function columnParts(columns) {
  const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const items = Object.entries(columns).map(([name, value]) => el("li", {}, printable(shorten(`${name}: ${text(value)}`, 500))));
  return items.length ? [el("h4", {}, "Columns of its row"), el("ul", {}, ...items)] : [];
}

function callText(call) {
  const values = Object.entries(call.args ?? {});
  const lines = values.map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`);
  return lines.join("\n");
}

function toolParts(node, images) {
  const { call, result, decision } = node;
  const parts = [];
  if (call) {
    parts.push(el("h4", {}, "Call"), block(`${call.name}\n${callText(call)}`, { class: "text call" }));
    if (call.error) parts.push(el("p", { class: "fault" }, `Not usable: ${printable(shorten(call.error, 300))}`));
  }
  if (result) {
    const fault = result.fault ? `failed: ${FAULTS[result.fault] ?? printable(result.fault)}` : "succeeded";
    const rows = [
      ["outcome", el("span", { class: result.fault ? "fault" : "" }, fault)],
      ["took", seconds(result.seconds)],
      ["attempts", result.attempts === 0 ? "0, nothing was run" : number(result.attempts)],
      ["cache", result.cached ? "hit: an identical call had this result already" : "no"],
    ];
    parts.push(el("h4", {}, "Result"), facts(rows), block(result.text, { class: "text result" }), ...images);
  }
  const given = el("details", { class: "more" }, el("summary", {}, "As the model sees it"), block(node.text));
  return [...parts, given, ...decisionParts(decision)];
}

function decisionParts(decision) {
  if (!decision) return [];
  const rows = [
    ["H at the start of the trajectory", `${number(decision.initial_entropy)} nats`],
    ["H after this result", `${number(decision.entropy)} nats, over ${plural(decision.probed_tokens, "token")}`],
    ["dH", signed(decision.delta)],
    ["P", number(decision.probability)],
    ["decision", decision.branches > 0 ? `${plural(decision.branches, "branch")} opened` : "not branched"],
    ["because", printable(shorten(decision.reason, 300))],
  ];
  return [el("h4", {}, "Branching"), facts(rows)];
}

function trajectoryTable(tree, index) {
  const through = [...tree.leaves.keys()].filter((leaf) => prefixOf(tree.nodes, tree.leaves[leaf].node).includes(index));
  const rows = through.map((leaf) => {
    const reward = tree.rewards[leaf];
    const read = () => go({ node: null, leaf, chat: 1 });
    return [
      el("button", { type: "button", click: read, "aria-label": `Read trajectory ${leaf + 1} as a conversation` }, `read ${leaf + 1}`),
      `${correctMark(reward)} ${number(reward?.total)}`,
      signed(tree.credits[leaf]?.advantage),
      [rewardParts(reward), rewardNote(reward)].filter(Boolean).join("; "),
      tree.leaves[leaf].stop_reason + (tree.mask[leaf] === false ? ", left out of training" : ""),
    ];
  });
  if (!rows.length) return [];
  return [el("h4", {}, "Trajectories through it"), table(["trajectory", "reward", "advantage", "parts", "stop reason"], rows, { class: "trajectories" })];
}

function conversation(tree, trajectory, mode, top, origin) {
  const nodes = prefixOf(tree.nodes, tree.leaves[trajectory].node);
  const turns = nodes.map((index) => turn(tree, index, mode, top, trajectory, origin));
  return [
    el("h3", { tabindex: "-1", id: "detail-title" }, `Trajectory ${trajectory + 1} as a conversation`),
    el("p", {}, `${correctMark(tree.rewards[trajectory])} ${describeLeaf(tree, trajectory)}`),
    el("div", { class: "chat" }, ...turns),
  ];
}

function turn(tree, index, mode, top, trajectory, origin) {
  const node = tree.nodes[index];
  const open = () => go({ node: index, chat: null });
  const where = el("button", { type: "button", class: "link", click: open }, `node ${index}`);
  const head = el("h4", {}, node.kind === "tool" ? `Tool: ${printable(shorten(node.call?.name ?? "", 60))} ` : `${NAMES[node.kind]} `, where);
  const parts = [head];
  if (node.kind === "model") parts.push(shadedText(node, mode, top, creditOf(tree, index, trajectory)));
  else if (node.kind === "tool") {
    const words = [seconds(node.result?.seconds), node.result?.cached ? "cached" : "", node.result?.fault ? `failed: ${FAULTS[node.result.fault] ?? ""}` : ""];
    head.append(el("small", { class: node.result?.fault ? "fault" : "" }, ` ${words.filter(Boolean).join(", ")}`));
    parts.push(block(node.result?.text ?? node.text, { class: "text result" }), ...imageFigures(tree, index, origin));
    if (node.decision) parts.push(el("p", { class: "decision" }, `◆ ${describeDecision(node.decision)}`));
  } else parts.push(block(node.text), ...imageFigures(tree, index, origin));
  return el("article", { class: `turn ${node.kind}` }, ...parts);
}
