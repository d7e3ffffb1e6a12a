// A rollout tree that grows: what the events of the Playground make up. No drawing.

// Nodes have the places in which they appeared, so that nothing moves when a turn is complete: `places` has the place of
// each node of the tree by its index, `open` the place of the unfinished node of each trajectory, `pictures` the addresses
// of its images by their hash.
export function emptyTree(task) {
  return { task, nodes: [], leaves: [], rewards: [], credits: [], mask: [], pictures: {}, places: [], open: new Map() };
}

const EVENTS = {
  token(tree, event) {
    const node = openNode(tree, event, { kind: "model", text: "", logprobs: [], entropies: [], char_offsets: [] });
    const end = node.char_offsets.at(-1) ?? 0;
    node.tokens.push(event.token);
    node.logprobs.push(event.logprob);
    node.entropies.push(event.entropy);
    node.text += event.text;
    node.char_offsets.push(end + [...event.text].length);
  },
  call(tree, event) {
    openNode(tree, event, { kind: "tool", text: "", call: event.call });
  },
  image(tree, event) {
    tree.pictures[event.sha256] = `data:image/png;base64,${event.png}`;
  },
  node(tree, event) {
    const place = event.trajectory === null ? 0 : (tree.open.get(event.trajectory) ?? tree.nodes.length);
    tree.open.delete(event.trajectory);
    tree.places[event.index] = place;
    tree.nodes[place] = { ...event.node, parent: event.node.parent === null ? null : tree.places[event.node.parent] };
  },
  decision(tree, event) {
    const place = tree.places[event.node];
    tree.nodes[place] = { ...tree.nodes[place], decision: event.decision };
  },
  leaf(tree, event) {
    tree.leaves.push({ ...event.leaf, node: tree.places[event.leaf.node] });
  },
  done(tree, event) {
    const moved = (credit) => Object.entries(credit.by_node).map(([index, value]) => [tree.places[index], value]);
    const credits = event.credits.map((credit) => ({ ...credit, by_node: Object.fromEntries(moved(credit)) }));
    Object.assign(tree, { rewards: event.rewards, mask: event.mask, credits });
  },
};

function openNode(tree, event, start) {
  if (!tree.open.has(event.trajectory)) {
    tree.open.set(event.trajectory, tree.nodes.length);
    tree.nodes.push({ parent: tree.places[event.parent], tokens: [], stop: null, result: null, decision: null, live: true, ...start });
  }
  return tree.nodes[tree.open.get(event.trajectory)];
}

export function addEvent(tree, event) {
  EVENTS[event.type]?.(tree, event);
}

// Nothing more comes: what is unfinished stays so.
export function endTree(tree) {
  for (const place of tree.open.values()) tree.nodes[place] = { ...tree.nodes[place], live: false };
  tree.open.clear();
}
